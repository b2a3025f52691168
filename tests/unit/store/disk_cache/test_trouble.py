"""Errors of the disk and deletions of the folder cost hits and nothing else."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.store.disk_cache import PAUSE_MS, DiskCache
from shalekv.store.disk_cache_folder import FOLDER
from shalekv.store.files import FileLock, FileSystem, ListedFile
from tests.kit.disks.cache_folders import (
    BYTES_MAX,
    data_of,
    files,
    finds,
    kept,
    open_cache,
    part,
    taken_bytes,
)
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.inline_runtime import InlineClock

REFUSALS = [
    ("create", errno.ENOSPC),
    ("write", errno.ENOSPC),
    ("rename", errno.EDQUOT),
    ("mkdir", errno.EACCES),
    ("append", errno.ENOSPC),
    ("touch", errno.EROFS),
    ("list_files", errno.EIO),
]


@pytest.mark.parametrize(("call", "error"), REFUSALS)
async def test_a_disk_that_refuses_switches_writing_off(
    tmp_path: Path, call: str, error: int
) -> None:
    """An error of the disk is not raised and is logged once; nothing is written for a while, and
    then again.
    """
    filesystem, clock = FailingFileSystem(), InlineClock()
    cache = open_cache(tmp_path, clock=clock, filesystem=filesystem)
    filesystem.fail(call, error)
    with capture_logs() as logs:
        await kept(cache, part(1), part(2))
        calls = len(filesystem.calls)
        await kept(cache, part(3))
        assert len(filesystem.calls) == calls
        await clock.sleep_ms(PAUSE_MS)
        await kept(cache, part(4))
    assert (len(logs), cache.counters.errors, cache.counters.dropped) == (1, 2, 4)
    assert not files(tmp_path)
    filesystem.clear_failures()
    await clock.sleep_ms(PAUSE_MS)
    await kept(cache, part(5), part(6))
    assert await finds(cache, part(5))
    assert cache.pending_bytes == 0
    filesystem.fail(call, error)
    with capture_logs() as logs:
        (tmp_path / FOLDER / "tally").unlink()  # so that a scan is due
        shutil.rmtree(files(tmp_path)[0].parent)
        await kept(cache, *(part(number) for number in range(100, 400)))
    assert len(logs) == 1


@pytest.mark.parametrize("call", ["open", "pread"])
async def test_files_that_cannot_be_read_are_misses(tmp_path: Path, call: str) -> None:
    """A read error of the disk is a miss that is counted as an error; the file stays."""
    filesystem = FailingFileSystem()
    cache = open_cache(tmp_path, filesystem=filesystem)
    await kept(cache, part(1))
    filesystem.fail(call, errno.EIO)
    assert not await finds(cache, part(1))
    assert (cache.counters.errors, cache.counters.misses) == (1, 1)
    filesystem.clear_failures()
    assert await finds(cache, part(1))


async def test_a_read_only_folder_still_serves(tmp_path: Path) -> None:
    """Parts are found although nothing can be changed, not even the time of their use."""
    await kept(open_cache(tmp_path), part(1))
    filesystem = FailingFileSystem()
    for call in ("create", "append", "touch", "touch_open", "rename", "unlink", "mkdir"):
        filesystem.fail(call, errno.EROFS)
    cache = open_cache(tmp_path, filesystem=filesystem)
    with capture_logs() as logs:
        await kept(cache, part(2))
    assert len(logs) == 1
    assert await finds(cache, part(1))
    assert not await finds(cache, part(2))
    (tmp_path / "file").write_bytes(b"")
    cache = open_cache(tmp_path / "file")  # which is no folder
    with capture_logs() as logs:
        await kept(cache, part(1))
    assert len(logs) == 1
    assert not await finds(cache, part(1))


async def test_the_folder_may_be_deleted_at_any_time(tmp_path: Path) -> None:
    """Without the folder, a shard, the tally, the lock or a file there are misses, and the cache
    goes on.
    """
    path = tmp_path / "cache"
    cache, number = open_cache(path), 0
    for vanishes in ("", FOLDER, "shard", "file", f"{FOLDER}/tally", f"{FOLDER}/lock"):
        parts = [part(number := number + 1) for _ in range(5)]
        await kept(cache, *parts)
        first = files(path)[0]
        target = {"shard": first.parent, "file": first}.get(vanishes, path / vanishes)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()
        for each in parts:
            await finds(cache, each)
        await kept(cache, *parts)
        for each in parts:
            assert await finds(cache, each)
    assert cache.counters.errors == cache.counters.dropped == 0


async def test_the_bound_holds_although_the_tally_was_deleted_or_cut(tmp_path: Path) -> None:
    """Without a tally the folder is scanned; after a wrong tally the bound holds again in
    the end.
    """
    cache = open_cache(tmp_path)
    tally = tmp_path / FOLDER / "tally"
    await kept(cache, *(part(number) for number in range(110)))
    assert taken_bytes(tmp_path) > BYTES_MAX * 3 // 4
    tally.unlink()
    await kept(cache, *(part(number) for number in range(200, 300)))
    assert taken_bytes(tmp_path) <= BYTES_MAX
    for number in range(300, 600):
        tally.write_bytes(b"")
        await kept(cache, part(number))
        if number % 10 == 0:
            assert taken_bytes(tmp_path) <= BYTES_MAX + BYTES_MAX // 3


class GatedFileSystem(FileSystem):
    """Blocks in the named call until the gate is open."""

    def __init__(self, gated: str) -> None:
        self._gated = gated
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.renamed = threading.Event()

    def list_files(self, path: Path) -> list[ListedFile]:
        self._pass("list_files")
        return super().list_files(path)

    def try_lock(self, path: Path) -> FileLock | None:
        lock = super().try_lock(path)
        self._pass("try_lock")
        return lock

    def rename(self, existing: Path, new: Path) -> None:
        super().rename(existing, new)
        self.renamed.set()

    def _pass(self, call: str) -> None:
        if call == self._gated:
            self.reached.set()
            self.gate.wait()


def gated(path: Path, call: str) -> tuple[DiskCache, GatedFileSystem, ThreadWorkers]:
    workers, filesystem = ThreadWorkers(2), GatedFileSystem(call)
    runtime = Runtime(LoopClock(), Random(1), workers)
    return DiskCache(path, BYTES_MAX, runtime, filesystem=filesystem), filesystem, workers


async def test_a_start_waits_for_nothing(tmp_path: Path) -> None:
    """During the first scan parts are found and accepted; they are written afterwards."""
    await kept(open_cache(tmp_path), part(1))
    cache, filesystem, workers = gated(tmp_path, "list_files")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(cache.run())
        await asyncio.to_thread(filesystem.reached.wait)
        assert await finds(cache, part(1))
        cache.keep(part(2), data_of(part(2)))
        assert await finds(cache, part(2))
        filesystem.gate.set()
        await asyncio.to_thread(filesystem.renamed.wait)
        running.cancel()
    workers.close()
    assert await finds(open_cache(tmp_path), part(2))


@pytest.mark.parametrize("stopped_in", ["list_files", "try_lock"])
async def test_a_cancelled_scan_leaves_no_lock(tmp_path: Path, stopped_in: str) -> None:
    """A process that is cancelled during a scan leaves no lock: the next one scans."""
    stopped, filesystem, workers = gated(tmp_path, stopped_in)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stopped.run())
        await asyncio.to_thread(filesystem.reached.wait)
        beside = open_cache(tmp_path)
        await kept(beside, part(1))
        assert not files(tmp_path)
        assert await finds(beside, part(1))  # it waits to be written
        running.cancel()
    filesystem.gate.set()
    workers.close()
    await asyncio.sleep(0)  # the lock that the thread returns too late is released
    assert await beside.flush()
    assert len(files(tmp_path)) == 1


async def test_a_damaged_part_that_waits_to_be_written_is_forgotten(tmp_path: Path) -> None:
    """A damaged part in the queue is no longer found and never written; other queued parts are."""
    cache = open_cache(tmp_path)
    for each in (part(1), part(2)):
        cache.keep(each, data_of(each))
    await cache.forget([part(1)])
    assert cache.pending_bytes == part(2).length
    assert not await finds(cache, part(1))
    await cache.flush()
    assert (await finds(cache, part(1)), await finds(cache, part(2))) == (False, True)
    assert len(files(tmp_path)) == 1
