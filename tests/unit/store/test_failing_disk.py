"""Outcomes and errors of a local store when calls to the disk fail."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.errors import ObjectNotFound, StoreBroken, StoreRefused, StoreUnavailable
from shalekv.store.api import Created, Exists, Unknown
from shalekv.store.files import FileStatus
from shalekv.store.local import LocalStore
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.inline_runtime import gathered, inline_runtime

NAME = "wal/1.sst"
BODY = bytes(range(250)) * 41  # which takes some reads and writes


@pytest.fixture
def disk() -> FailingFileSystem:
    """The disk below the store."""
    return FailingFileSystem()


@pytest.fixture
async def store(tmp_path: Path, disk: FailingFileSystem) -> LocalStore:
    """A store with one object, whose folders exist and are known to be durable."""
    opened = LocalStore(tmp_path / "database", inline_runtime(), filesystem=disk)
    assert await opened.create("wal/0.sst", b"zero") == Created()
    return opened


async def names(store: LocalStore) -> list[str]:
    return [info.name for info in await gathered(store.list("wal/"))]


@pytest.mark.parametrize("after", [0, 1], ids=["of the file", "of the folder"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
async def test_a_failed_sync_breaks_the_store(
    store: LocalStore, disk: FailingFileSystem, tmp_path: Path, error: int, after: int
) -> None:
    """After a failed sync nothing is written any more, even if the disk seems to work again, and an
    object whose folder was not synced is not read. Another process, whose own sync works, reads the
    object and recognises it.
    """
    disk.fail("fsync", error, after=after)
    with pytest.raises(StoreBroken):
        await store.create(NAME, BODY)
    disk.clear_failures()
    disk.calls.clear()
    with pytest.raises(StoreBroken, match="fsync of"):
        await store.create("wal/2.sst", b"")
    with pytest.raises(StoreBroken):
        await store.delete(["wal/0.sst"])
    assert not {"create", "write", "link", "unlink", "fsync"} & set(disk.calls)
    assert (await store.get("wal/0.sst")).data == b"zero"  # it was durable before
    other = LocalStore(tmp_path / "database", inline_runtime(1))
    if after:
        with pytest.raises(StoreBroken):
            await store.get(NAME)
        with pytest.raises(StoreBroken):
            await names(store)
        assert await other.create(NAME, BODY) == Exists()
        assert (await other.get(NAME)).data == BODY


@pytest.mark.parametrize("call", ["mkdir", "create", "write", "link"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_is_reported_and_passes(
    tmp_path: Path, disk: FailingFileSystem, call: str, error: int
) -> None:
    """On a full disk nothing is created or left behind, and later creates succeed."""
    store = LocalStore(tmp_path / "database", inline_runtime(), filesystem=disk)
    for after in (0, 3) if call == "write" else (0,):
        disk.fail(call, error, after=after)
        with pytest.raises(StoreUnavailable) as raised:
            await store.create(NAME, BODY)
        assert raised.value.name == NAME
        assert await names(store) == []
    disk.clear_failures()
    assert await store.create(NAME, BODY) == Created()
    assert (await store.get(NAME)).data == BODY
    assert await names(store) == [NAME]


@pytest.mark.parametrize(
    ("call", "error", "problem"),
    [
        *((call, errno.EIO, "check it") for call in ("create", "write", "link", "open_folder")),
        ("link", errno.EPERM, "no hard links"),
        ("link", errno.ENOTSUP, "no hard links"),
    ],
)
async def test_what_breaks_the_store(
    store: LocalStore, disk: FailingFileSystem, call: str, error: int, problem: str
) -> None:
    """A disk that cannot write, or has no hard links and so no compare-and-swap, is not written to
    any more.
    """
    disk.fail(call, error)
    with pytest.raises(StoreBroken, match=problem):
        await store.create(NAME, b"x")
    disk.clear_failures()
    with pytest.raises(StoreBroken, match=problem):
        await store.create("wal/2.sst", b"x")


@pytest.mark.parametrize(
    ("error", "is_known"), [(errno.ESTALE, False), (errno.ETIMEDOUT, False), (errno.ENOENT, True)]
)
async def test_a_link_that_failed(
    store: LocalStore, disk: FailingFileSystem, error: int, *, is_known: bool
) -> None:
    """An error that leaves open whether the link was made is an unknown outcome. A temporary file
    that a collector removed meanwhile is not: the create can be repeated.
    """
    disk.fail("link", error)
    if is_known:
        with pytest.raises(StoreUnavailable):
            await store.create(NAME, b"x")
    else:
        assert isinstance(await store.create(NAME, b"x"), Unknown)
    disk.clear_failures()
    assert await store.create(NAME, b"x") == Created()


async def test_an_unremovable_temporary_file_is_no_failure(
    store: LocalStore, disk: FailingFileSystem
) -> None:
    """An object is created although its temporary name stays, which a list shows."""
    disk.fail("unlink", errno.EACCES)
    assert await store.create(NAME, b"x") == Created()
    disk.clear_failures()
    shown = await names(store)
    assert len(shown) == 3
    await store.delete([name for name in shown if name.endswith(".tmp")])
    assert await names(store) == ["wal/0.sst", NAME]
    assert (await store.get(NAME)).data == b"x"


@pytest.mark.parametrize("call", ["open", "pread"])
async def test_reads_that_fail_can_be_repeated(
    store: LocalStore, disk: FailingFileSystem, call: str
) -> None:
    """A failed read is unavailable, not missing and not empty, and breaks nothing."""
    disk.fail(call, errno.EIO)
    with pytest.raises(StoreUnavailable):
        await store.get("wal/0.sst")
    disk.clear_failures()
    assert (await store.get("wal/0.sst")).data == b"zero"
    assert await store.create(NAME, BODY) == Created()
    assert disk.calls.count("write") >= 10
    assert await store.get_range(NAME, 100, 9_000) == BODY[100:9_100]


async def test_a_file_that_was_cut_ends_where_it_ends(tmp_path: Path) -> None:
    """A file that is shorter than its status says is read to its end, and the read ends."""

    class Boasting(FailingFileSystem):
        def fstat(self, descriptor: int) -> FileStatus:
            return replace(super().fstat(descriptor), size_bytes=100)

    store = LocalStore(tmp_path / "database", inline_runtime(), filesystem=Boasting())
    await store.create(NAME, b"short")
    assert (await store.get(NAME)).data == b"short"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (errno.EROFS, "Read-only file system: mount it for writing"),
        (errno.EPERM, "Operation not permitted: the system allows no writes"),
        (errno.ENOENT, "no folder can be made in .*: choose another folder"),
    ],
)
async def test_folders_that_cannot_be_made(
    tmp_path: Path, disk: FailingFileSystem, error: int, problem: str
) -> None:
    """An error that no retry fixes is a refusal, so that a creation ends instead of waiting."""
    store = LocalStore(tmp_path / "database", inline_runtime(), filesystem=disk)
    disk.fail("mkdir", error)
    with pytest.raises(StoreRefused, match=problem) as raised:
        await store.create(NAME, BODY)
    assert not raised.value.may_pass
    disk.clear_failures()
    assert await store.create(NAME, BODY) == Created()


async def test_a_file_in_the_place_of_a_folder(store: LocalStore, tmp_path: Path) -> None:
    """A file in the place of a folder is reported as a refusal, and stays."""
    (tmp_path / "database" / "levels").write_bytes(b"a file")
    with pytest.raises(StoreRefused, match="Not a directory: there is a file"):
        await store.create("levels/1.sst", b"")
    assert [info.name for info in await gathered(store.list("levels/"))] == []


@pytest.mark.parametrize("may_write", [True, False])
async def test_folders_that_may_not_be_opened(
    tmp_path: Path, disk: FailingFileSystem, *, may_write: bool
) -> None:
    """A folder above that can be neither opened nor written to needs no sync."""
    store = LocalStore(tmp_path / "database", inline_runtime(), filesystem=disk)
    await store.now_ms()
    other = LocalStore(tmp_path / "database", inline_runtime(), filesystem=disk)
    disk.fail("open_folder", errno.EACCES, after=1)
    if may_write:
        with pytest.raises(StoreRefused, match="Permission denied: this user"):
            await other.now_ms()
    else:
        disk.fail("may_write", errno.EACCES)
        await other.now_ms()


async def test_a_missing_folder_is_made_again(store: LocalStore, tmp_path: Path) -> None:
    """When the folder of a running store is removed, later creates make it again."""
    for path in (tmp_path / "database" / "wal").iterdir():
        path.unlink()
    (tmp_path / "database" / "wal").rmdir()
    with pytest.raises(ObjectNotFound):
        await store.get("wal/0.sst")
    with pytest.raises(StoreUnavailable):
        await store.create(NAME, b"x")
    assert await store.create(NAME, b"x") == Created()
