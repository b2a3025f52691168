"""What a local store says and does when calls to the disk fail."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.errors import ObjectNotFound, StoreBroken, StoreRefused, StoreUnavailable
from shalekv.store.api import Created, Exists, Unknown
from shalekv.store.filesystem import FileStatus
from shalekv.store.local import LocalStore
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.inline_runtime import gathered, inline_runtime

NAME = "wal/1.sst"


@pytest.fixture
def disk() -> FailingFileSystem:
    """The disk below the store."""
    return FailingFileSystem()


@pytest.fixture
async def store(tmp_path: Path, disk: FailingFileSystem) -> LocalStore:
    """A store with one object, whose folders are made and known to be durable."""
    opened = LocalStore(tmp_path / "database", inline_runtime(), filesystem=disk)
    assert await opened.create("wal/0.sst", b"zero") == Created()
    return opened


async def names(store: LocalStore) -> list[str]:
    """The names in ``wal/``."""
    return [info.name for info in await gathered(store.list("wal/"))]


@pytest.mark.parametrize("after", [0, 1], ids=["of the file", "of the folder"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
async def test_a_failed_sync_breaks_the_store(
    store: LocalStore, disk: FailingFileSystem, error: int, after: int
) -> None:
    """After a failed sync nothing is written any more, even if the disk seems to be well."""
    disk.fail("fsync", error, after=after)
    with pytest.raises(StoreBroken):
        await store.create(NAME, b"x" * 5000)
    disk.recover()
    disk.calls.clear()
    with pytest.raises(StoreBroken, match="fsync of"):
        await store.create("wal/2.sst", b"")
    with pytest.raises(StoreBroken):
        await store.delete(["wal/0.sst"])
    assert not {"create", "write", "link", "unlink", "fsync"} & set(disk.calls)
    assert (await store.get("wal/0.sst")).data == b"zero"  # it was durable before


async def test_what_a_failed_sync_left_is_not_shown(
    store: LocalStore, disk: FailingFileSystem
) -> None:
    """An object whose folder could not be synced is not read: it may be gone tomorrow."""
    disk.fail("fsync", errno.EIO, after=1)
    with pytest.raises(StoreBroken):
        await store.create(NAME, b"x")
    disk.recover()
    with pytest.raises(StoreBroken):
        await store.get(NAME)
    with pytest.raises(StoreBroken):
        await names(store)


async def test_another_process_settles_what_a_failed_sync_left(
    store: LocalStore, disk: FailingFileSystem, tmp_path: Path
) -> None:
    """A process whose own sync works finds out, and a retry of the same bytes is recognised."""
    disk.fail("fsync", errno.EIO, after=1)
    with pytest.raises(StoreBroken):
        await store.create(NAME, b"x")
    other = LocalStore(tmp_path / "database", inline_runtime(1))
    assert await other.create(NAME, b"x") == Exists()
    assert (await other.get(NAME)).data == b"x"


@pytest.mark.parametrize("call", ["mkdir", "create", "write", "link"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
async def test_a_full_disk_is_told_and_passes(
    tmp_path: Path, disk: FailingFileSystem, call: str, error: int
) -> None:
    """When there is no room, nothing is created or left behind, and later it can be."""
    store = LocalStore(tmp_path / "database", inline_runtime(), filesystem=disk)
    disk.fail(call, error)
    for _ in range(2):
        with pytest.raises(StoreUnavailable) as raised:
            await store.create(NAME, b"x" * 5000)
        assert raised.value.name == NAME
    assert await names(store) == []
    disk.recover()
    assert await store.create(NAME, b"x" * 5000) == Created()
    assert (await store.get(NAME)).data == b"x" * 5000
    assert await names(store) == [NAME]


async def test_no_room_in_the_middle_of_a_write(store: LocalStore, disk: FailingFileSystem) -> None:
    """A disk that is full halfway through an object leaves none of it."""
    disk.fail("write", errno.ENOSPC, after=3)
    with pytest.raises(StoreUnavailable, match="No space left"):
        await store.create(NAME, b"x" * 5000)
    assert await names(store) == ["wal/0.sst"]


@pytest.mark.parametrize("call", ["create", "write", "link", "open_folder"])
async def test_errors_of_input_and_output_break_the_store(
    store: LocalStore, disk: FailingFileSystem, call: str
) -> None:
    """A disk that cannot write is not written to any more."""
    disk.fail(call, errno.EIO)
    with pytest.raises(StoreBroken):
        await store.create(NAME, b"x")
    disk.recover()
    with pytest.raises(StoreBroken, match="check it"):
        await store.create("wal/2.sst", b"x")


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP])
async def test_a_file_system_without_links_is_refused(
    store: LocalStore, disk: FailingFileSystem, error: int
) -> None:
    """Without hard links there is no compare-and-swap, and this is said plainly."""
    disk.fail("link", error)
    with pytest.raises(StoreBroken, match="no hard links"):
        await store.create(NAME, b"x")
    disk.recover()
    assert await names(store) == ["wal/0.sst"]


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ETIMEDOUT])
async def test_a_link_that_nobody_answered_is_unknown(
    store: LocalStore, disk: FailingFileSystem, error: int
) -> None:
    """An error that leaves open whether the link was made is an unknown outcome."""
    disk.fail("link", error)
    assert isinstance(await store.create(NAME, b"x"), Unknown)
    disk.recover()
    assert await store.create(NAME, b"x") == Created()


async def test_a_temporary_file_that_is_gone_is_no_loss(
    store: LocalStore, disk: FailingFileSystem
) -> None:
    """A collector may remove the temporary file of a stalled creator, who then tries again."""
    disk.fail("link", errno.ENOENT)
    with pytest.raises(StoreUnavailable):
        await store.create(NAME, b"x")
    disk.recover()
    assert await store.create(NAME, b"x") == Created()


async def test_an_unremovable_temporary_file_is_no_failure(
    store: LocalStore, disk: FailingFileSystem
) -> None:
    """An object is created although its temporary name stays, which a list shows."""
    disk.fail("unlink", errno.EACCES)
    assert await store.create(NAME, b"x") == Created()
    disk.recover()
    shown = await names(store)
    assert len(shown) == 3
    await store.delete([name for name in shown if name.endswith(".tmp")])
    assert await names(store) == ["wal/0.sst", NAME]
    assert (await store.get(NAME)).data == b"x"


@pytest.mark.parametrize("call", ["open", "pread"])
async def test_reads_that_fail_can_be_repeated(
    store: LocalStore, disk: FailingFileSystem, call: str
) -> None:
    """A read that fails is unavailable, not missing and not empty, and breaks nothing."""
    disk.fail(call, errno.EIO)
    with pytest.raises(StoreUnavailable):
        await store.get("wal/0.sst")
    disk.recover()
    assert (await store.get("wal/0.sst")).data == b"zero"
    assert await store.create(NAME, b"x") == Created()


async def test_short_reads_and_writes_are_continued(
    store: LocalStore, disk: FailingFileSystem
) -> None:
    """An object that the system writes and reads in pieces is whole."""
    data = bytes(range(250)) * 41
    await store.create(NAME, data)
    assert disk.calls.count("write") >= 10
    assert (await store.get(NAME)).data == data
    assert await store.get_range(NAME, 100, 9_000) == data[100:9_100]


async def test_a_file_that_was_cut_ends_where_it_ends(tmp_path: Path) -> None:
    """A file that is shorter than the system said is read to its end, and not for ever."""

    class Boasting(FailingFileSystem):
        def fstat(self, descriptor: int) -> FileStatus:
            return replace(super().fstat(descriptor), size_bytes=100)

    store = LocalStore(tmp_path / "database", inline_runtime(), filesystem=Boasting())
    await store.create(NAME, b"short")
    assert (await store.get(NAME)).data == b"short"


async def test_a_file_in_the_place_of_a_folder(store: LocalStore, tmp_path: Path) -> None:
    """A file where a folder should be is told, stays, and is nothing to wait for."""
    (tmp_path / "database" / "levels").write_bytes(b"a file")
    with pytest.raises(StoreRefused, match="Not a directory: a file stands"):
        await store.create("levels/1.sst", b"")
    assert [info.name for info in await gathered(store.list("levels/"))] == []


@pytest.mark.parametrize("may_write", [True, False])
async def test_folders_that_may_not_be_opened(
    tmp_path: Path, disk: FailingFileSystem, *, may_write: bool
) -> None:
    """A folder above that may be neither opened nor written to needs no sync of ours."""
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
    """When somebody removes the folder of a running store, later creates make it again."""
    for path in (tmp_path / "database" / "wal").iterdir():
        path.unlink()
    (tmp_path / "database" / "wal").rmdir()
    with pytest.raises(ObjectNotFound):
        await store.get("wal/0.sst")
    with pytest.raises(StoreUnavailable):
        await store.create(NAME, b"x")
    assert await store.create(NAME, b"x") == Created()
