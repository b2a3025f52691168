"""Particulars of the local store: its files, foreign files, and temporary ones."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from random import Random

import pytest

import shalekv.store.local
from shalekv.errors import InvalidUrl, ObjectNotFound, StoreUnavailable
from shalekv.store.api import Created, Exists
from shalekv.store.files import REAL_FILE_SYSTEM, FileSystem, FolderEntry
from shalekv.store.local import LocalStore
from tests.kit.constants import set_constants
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.disks.warm import WarmFileSystem
from tests.kit.inline_runtime import finish, inline_runtime


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of the database, which does not exist yet."""
    return tmp_path / "a" / "b"


@pytest.fixture
def store(root: Path) -> LocalStore:
    """A store without objects."""
    return LocalStore(root, inline_runtime())


def names(store: LocalStore, prefix: str = "wal/", start_after: str = "") -> list[str]:
    async def listed() -> list[str]:
        return [info.name async for info in store.list(prefix, start_after=start_after)]

    return finish(listed())


async def test_an_object_is_a_file(store: LocalStore, root: Path) -> None:
    """An object is a file with its name and bytes, and nothing is left beside it. Reading, listing
    and deleting in a missing database create no folder.
    """
    assert names(store) == []
    with pytest.raises(ObjectNotFound):
        await store.get("wal/1.sst")
    await store.delete(["wal/1.sst"])
    assert not root.parent.exists()
    for body in (b"bytes", b"other"):
        await store.create("wal/1.sst", body)
        assert (root / "wal" / "1.sst").read_bytes() == b"bytes"
        assert [path.name for path in (root / "wal").iterdir()] == ["1.sst"]


def test_foreign_files_are_shown_and_can_be_deleted(store: LocalStore, root: Path) -> None:
    """A list shows files of other programs, of any name, so that a collector can delete them."""
    finish(store.create("wal/1.sst", b""))
    foreign = [
        *(b"README", b"1.sst.0123.tmp", b".hidden", b"\xff\xfe", b"a\nb", 255 * b"x"),
        "😀".encode(),
    ]
    for name in foreign:
        (root / "wal" / os.fsdecode(name)).write_bytes(name)
    shown = names(store)
    assert [os.fsencode(name) for name in shown] == sorted(
        [b"wal/1.sst", *(b"wal/" + name for name in foreign)]
    )
    for after, last in enumerate(shown):
        assert names(store, start_after=last) == shown[after + 1 :]
    finish(store.delete(shown))
    assert names(store) == []


def test_only_files_are_objects(store: LocalStore, root: Path, tmp_path: Path) -> None:
    """Folders, links, pipes and sockets are neither listed nor read, and never block."""
    finish(store.create("wal/1.sst", b""))
    (root / "wal" / "folder").mkdir()
    (tmp_path / "secret").write_text("secret")
    (root / "wal" / "link").symlink_to(tmp_path / "secret")
    (root / "wal" / "all").symlink_to(tmp_path)
    os.mkfifo(root / "wal" / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "wal" / "socket"))
        assert names(store) == ["wal/1.sst"]
        for name in ("folder", "link", "all", "pipe", "socket", "1.sst/below", 250 * "long"):
            with pytest.raises(ObjectNotFound):
                finish(store.get(f"wal/{name}"))
    finish(store.delete(["wal/folder", "wal/1.sst/below", "wal/none"]))
    assert (root / "wal" / "folder").is_dir()
    assert names(store) == ["wal/1.sst"]


def test_a_linked_folder_is_followed(store: LocalStore, root: Path, tmp_path: Path) -> None:
    """An operator may put a folder of objects on another disk by a symbolic link."""
    (tmp_path / "large disk").mkdir()
    root.mkdir(parents=True)
    (root / "levels").symlink_to(tmp_path / "large disk")
    assert finish(store.create("levels/1.sst", b"x")) == Created()
    assert names(store, "levels/") == ["levels/1.sst"]
    assert (tmp_path / "large disk" / "1.sst").read_bytes() == b"x"


class Overtaken(FileSystem):
    """While a list stalls after it has read the names, others replace every object."""

    def __init__(self, steps: list[tuple[str, str]]) -> None:
        """Each step is a name that goes, and the one that has come before it goes."""
        self.steps = steps

    def list_folder(self, path: Path) -> list[FolderEntry]:
        entries = super().list_folder(path)
        if self.steps:
            gone, come = self.steps.pop(0)
            (path / come).write_bytes(b"x")
            (path / gone).unlink()
        return entries


@pytest.mark.parametrize("kept", [[], ["1"]], ids=["nothing-else", "beside-an-old-one"])
def test_a_page_is_of_one_moment(root: Path, kept: list[str]) -> None:
    """However often the newest object is replaced during a list, the list shows one that was the
    newest at some moment of it. It never shows none, and never an older one as the last.
    """
    filesystem = Overtaken([("2", "3"), ("3", "4")])
    (root / "wal").mkdir(parents=True)
    for name in [*kept, "2"]:
        (root / "wal" / name).write_bytes(b"x")
    shown = names(LocalStore(root, inline_runtime(), filesystem=filesystem))
    assert shown == [f"wal/{name}" for name in [*kept, "4"]]


async def test_a_taken_temporary_name_is_left_alone(root: Path) -> None:
    """A temporary name is drawn from the runtime. An existing file of that name is never written
    to: it may be an object's second name.
    """
    disk = FailingFileSystem()
    disk.fail("unlink", errno.EACCES)
    await LocalStore(root, inline_runtime(5), filesystem=disk).create("wal/1.sst", b"first")
    (temporary,) = (path.name for path in (root / "wal").glob("*.tmp"))
    assert temporary == f"1.sst.{Random(5).getrandbits(64):016x}.tmp"
    store = LocalStore(root, inline_runtime(5))
    with pytest.raises(StoreUnavailable):
        await store.create("wal/1.sst", b"second")
    assert (await store.get("wal/1.sst")).data == b"first"
    assert await store.create("wal/1.sst", b"second") == Exists()


async def test_syncs_are_few(root: Path) -> None:
    """Once its folder is known, an object costs one sync of the file and one of the folder. One
    with a second name, as some backups make them, costs one sync more, and not one for each read.
    """
    disk = FailingFileSystem()
    store = LocalStore(root, inline_runtime(), filesystem=disk)
    await store.create("wal/1.sst", b"x")
    disk.calls.clear()
    await store.create("wal/2.sst", b"")
    assert disk.calls == ["open_folder", "create", "fsync", "link", "fsync", "unlink"]
    assert await store.create("wal/2.sst", b"") == Exists()
    (root / "backup").mkdir()
    os.link(root / "wal" / "1.sst", root / "backup" / "1.sst")
    disk.calls.clear()
    for _ in range(3):
        await store.get_range("wal/1.sst", 0, 1)
        await store.head("wal/1.sst")
        names(store)
    assert disk.calls.count("fsync") == 1
    await store.delete(["wal/1.sst"])
    assert await store.create("wal/1.sst", b"y") == Created()


async def test_second_names_that_were_seen_are_bounded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second name that was forgotten costs another sync; a list with more of them than the bound
    costs no more.
    """
    monkeypatch.setattr(shalekv.store.local, "SEEN_SYNCED_MAX_COUNT", 3)
    disk = FailingFileSystem()
    store = LocalStore(root, inline_runtime(), filesystem=disk)
    (root / "backup").mkdir(parents=True)
    objects = [f"wal/{number}.sst" for number in range(5)]
    for number, name in enumerate(objects):
        await store.create(name, b"x")
        os.link(root / name, root / "backup" / str(number))
    disk.calls.clear()
    syncs = []
    for name in (*objects, objects[-1], objects[0], objects[0]):
        await store.head(name)
        syncs.append(disk.calls.count("fsync"))
    assert syncs == [1, 2, 3, 4, 5, 5, 6, 6]
    for _ in range(3):
        names(store)
    assert disk.calls.count("fsync") == 7


@pytest.mark.parametrize("root", [Path("data"), Path("./data"), Path("/data/../etc")])
def test_the_folder_is_absolute(root: Path) -> None:
    """A relative path, which depends on the working directory, is refused."""
    with pytest.raises(InvalidUrl):
        LocalStore(root, inline_runtime())


SST = "levels/%032x.sst"


def warm_levels(root: Path) -> tuple[LocalStore, WarmFileSystem]:
    """A store with some SSTs, of a page and more, all in the page cache, and its files."""
    filesystem = WarmFileSystem()
    store = LocalStore(root, inline_runtime(), filesystem=filesystem)
    for number in range(5):
        finish(store.create(SST % number, bytes([number]) * 5_000))
    return store, filesystem


def test_an_sst_that_was_read_is_read_again_at_once(root: Path) -> None:
    """The second read of a part needs no worker, as long as the part is in the page cache; ranges
    mean the same, and each read counts as one request.
    """
    levels, _ = warm_levels(root)
    assert levels.get_range_now(SST % 1, 0, 10) is None
    before = levels.sent.total
    ranges = [(0, 10), (4_096, 10), (4_990, 100), (9_000, 10), (-10, 100), (0, 0)]
    for offset, length in ranges:
        expected = finish(levels.get_range(SST % 1, offset, length))
        assert levels.get_range_now(SST % 1, offset, length) == expected
    assert levels.sent.total == before + 2 * len(ranges)
    assert levels.get_range_now(SST % 2, 0, 10) is None
    finish(levels.create("wal/1.sst", b"wal"))
    finish(levels.get_range("wal/1.sst", 0, 1))
    assert levels.get_range_now("wal/1.sst", 0, 1) is None  # its objects are read as a whole


def test_reads_without_waiting_are_whole_or_nothing(tmp_path: Path) -> None:
    """Whatever the system has in memory, and whether it can tell: all bytes are there, or none."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    descriptor = REAL_FILE_SYSTEM.open(tmp_path / "file")
    try:
        expected = REAL_FILE_SYSTEM.pread(descriptor, 5_000, 3_000)
        assert REAL_FILE_SYSTEM.pread_now(descriptor, 5_000, 3_000) in (None, expected)
        assert REAL_FILE_SYSTEM.pread_now(descriptor, 5_000, 16_000) is None  # it ends before that
    finally:
        REAL_FILE_SYSTEM.close(descriptor)


def test_what_is_not_in_the_page_cache_is_left_to_a_worker(root: Path) -> None:
    """A read that would wait for the disk returns nothing, and is not counted."""
    store = LocalStore(root, inline_runtime(), filesystem=FailingFileSystem())
    finish(store.create(SST % 1, b"sst"))
    finish(store.get_range(SST % 1, 0, 1))
    before = store.sent.total
    assert store.get_range_now(SST % 1, 0, 1) is None
    assert store.sent.total == before


def test_few_ssts_stay_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many stay open, those that are used rather than others, and no deleted ones,
    whoever has deleted them.
    """
    limits = {"KEPT_FILES_MAX": 3, "SWEEP_INTERVAL_MS": 0}
    set_constants(monkeypatch, {f"shalekv.store.local:{name}": at for name, at in limits.items()})
    levels, filesystem = warm_levels(root)

    def open_ssts() -> set[str]:
        return {f"levels/{path.name}" for path in filesystem.open_files.values()}

    for number in (0, 1, 2, 0, 3):
        finish(levels.get_range(SST % number, 0, 1))
    assert open_ssts() == {SST % 0, SST % 2, SST % 3}
    finish(levels.delete([SST % 2]))
    assert open_ssts() == {SST % 0, SST % 3}
    (root / (SST % 3)).unlink()
    assert finish(levels.get_range(SST % 3, 0, 1)) == b"\3"
    finish(levels.get_range(SST % 4, 0, 1))
    assert open_ssts() == {SST % 0, SST % 4}
    with pytest.raises(ObjectNotFound):
        finish(levels.get_range(SST % 3, 0, 1))
    (root / (SST % 0)).unlink()
    assert names(levels, "levels/") == [SST % 1, SST % 4]
    assert open_ssts() == {SST % 4}
    finish(levels.close())
    assert open_ssts() == set()


@pytest.mark.parametrize("call", ["touch", "resize", "append", "try_lock"])
def test_no_file_is_changed_behind_a_link(tmp_path: Path, call: str) -> None:
    """A link in place of a file that a store, a cache or a safekeeper shares is not followed."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    arguments = {"resize": (0,), "append": (b"more",)}.get(call, ())
    with pytest.raises(OSError, match="symbolic links"):
        getattr(REAL_FILE_SYSTEM, call)(tmp_path / "link", *arguments)
    assert (tmp_path / "secret").read_text() == "secret"
