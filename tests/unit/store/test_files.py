"""The contract of file systems: the real one, and those that lose data or fail calls for a test."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from shalekv.store.files import DurableFiles, FileSystem
from tests.kit.disks.careless import ForwardingFileSystem
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.disks.failing import FailingFileSystem

DATA = bytes(range(256)) * 10

FILE_SYSTEMS: dict[str, Callable[[], FileSystem]] = {
    "real": FileSystem,
    "crashing": CrashingDisk,
    "failing": FailingFileSystem,
    "forwarding": lambda: ForwardingFileSystem(FileSystem()),
}


@pytest.fixture(params=FILE_SYSTEMS)
def filesystem(request: pytest.FixtureRequest) -> FileSystem:
    return FILE_SYSTEMS[request.param]()


@pytest.fixture
def folder(filesystem: FileSystem, tmp_path: Path) -> Path:
    """An empty folder, whose parents exist."""
    path = tmp_path / "folder"
    DurableFiles(filesystem, "test").ensure_folder(path)
    return path


def write(filesystem: FileSystem, path: Path, data: bytes = DATA) -> None:
    descriptor = filesystem.create(path)
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[filesystem.write(descriptor, unwritten) :]
    filesystem.fsync(descriptor)
    filesystem.close(descriptor)


def read(filesystem: FileSystem, path: Path, offset: int = 0, length: int = 1 << 20) -> bytes:
    descriptor = filesystem.open(path)
    try:
        return DurableFiles(filesystem, "test").pread(descriptor, offset, length)
    finally:
        filesystem.close(descriptor)


def test_a_file_is_created_once_and_read_in_parts(filesystem: FileSystem, folder: Path) -> None:
    """A second create of a name fails; reads end at the end of the file."""
    write(filesystem, folder / "a")
    with pytest.raises(FileExistsError):
        filesystem.create(folder / "a")
    assert read(filesystem, folder / "a") == DATA
    assert read(filesystem, folder / "a", 300, 1_500) == DATA[300:1_800]
    assert read(filesystem, folder / "a", len(DATA)) == b""
    with pytest.raises(FileNotFoundError):
        filesystem.open(folder / "b")
    with pytest.raises(NotADirectoryError):
        filesystem.open(folder / "a" / "b")


def test_a_file_is_changed_in_place(filesystem: FileSystem, folder: Path) -> None:
    """Writes replace bytes at their offset; allocation adds zeros, and never cuts a file."""
    write(filesystem, folder / "a", b"0123456789")
    descriptor = filesystem.open_update(folder / "a")
    assert filesystem.pwrite(descriptor, memoryview(b"xyz"), 4) == 3
    filesystem.allocate(descriptor, 5)
    assert filesystem.pread(descriptor, 20, 0) == b"0123xyz789"
    filesystem.allocate(descriptor, 12)
    filesystem.sync_data(descriptor)
    filesystem.drop_cached(descriptor)
    assert filesystem.pread(descriptor, 20, 8) == b"89\0\0"
    assert filesystem.fstat(descriptor).size_bytes == 12
    filesystem.close(descriptor)


def test_a_link_is_a_compare_and_swap(filesystem: FileSystem, folder: Path) -> None:
    """A second name shows the same file, and is refused when the name is taken."""
    write(filesystem, folder / "a")
    write(filesystem, folder / "b", b"b")
    filesystem.link(folder / "a", folder / "c")
    with pytest.raises(FileExistsError):
        filesystem.link(folder / "b", folder / "c")
    found = filesystem.stat(folder / "c")
    assert (found.is_file, found.links, found.size_bytes) == (True, 2, len(DATA))
    assert found.inode == filesystem.stat(folder / "a").inode
    filesystem.unlink(folder / "a")
    assert filesystem.stat(folder / "c").links == 1
    assert read(filesystem, folder / "c") == DATA
    with pytest.raises(FileNotFoundError):
        filesystem.unlink(folder / "a")


def test_a_rename_replaces(filesystem: FileSystem, folder: Path) -> None:
    """A renamed file takes the place of another one; a folder takes its files along."""
    write(filesystem, folder / "a")
    write(filesystem, folder / "b", b"b")
    filesystem.rename(folder / "a", folder / "b")
    assert read(filesystem, folder / "b") == DATA
    filesystem.mkdir(folder / "one")
    write(filesystem, folder / "one" / "a")
    filesystem.rename(folder / "one", folder / "two")
    assert read(filesystem, folder / "two" / "a") == DATA
    assert {entry.name for entry in filesystem.list_folder(folder)} == {"b", "two"}


def test_folders(filesystem: FileSystem, folder: Path) -> None:
    """A folder is made in an existing one, listed, and removed when it is empty."""
    with pytest.raises(FileExistsError):
        filesystem.mkdir(folder)
    with pytest.raises(FileNotFoundError):
        filesystem.mkdir(folder / "none" / "below")
    filesystem.mkdir(folder / "sub")
    write(filesystem, folder / "sub" / "a")
    assert [(at.name, at.size_bytes) for at in filesystem.list_files(folder / "sub")] == [
        ("a", len(DATA))
    ]
    assert filesystem.list_files(folder) == []
    assert [tuple(at) for at in filesystem.list_folder(folder)] == [("sub", True)]
    assert filesystem.stat_folder(folder).device == filesystem.stat_folder(folder / "sub").device
    with pytest.raises(NotADirectoryError):
        filesystem.stat_folder(folder / "sub" / "a")
    with pytest.raises(OSError, match="not empty") as full:
        filesystem.rmdir(folder / "sub")
    assert full.value.errno == errno.ENOTEMPTY
    filesystem.unlink(folder / "sub" / "a")
    filesystem.rmdir(folder / "sub")
    with pytest.raises(FileNotFoundError):
        filesystem.list_folder(folder / "sub")
    assert filesystem.may_write(folder)


def test_times_and_locks(filesystem: FileSystem, folder: Path) -> None:
    """A touch creates a file, and never sets its time back; a lock is granted once it is free."""
    first = filesystem.touch(folder / "clock")
    assert filesystem.touch(folder / "clock").modified_ms >= first.modified_ms > 0
    lock = filesystem.try_lock(folder / "lock")
    assert lock is not None
    lock.release()
    again = filesystem.try_lock(folder / "lock")
    assert again is not None
    again.release()
