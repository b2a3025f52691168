"""One sync serves everything submitted meanwhile, and no future is done before it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import TypeVar, TypeVarTuple

import pytest

from shalekv.errors import StoreBroken
from shalekv.protocol.quorum.acceptor import Flush, Save, Truncate, Write
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogHealth
from shalekv.runtime import ThreadWorkers
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.safekeeper_log.syncer import Syncer
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.disks.member_logs import (
    ALL,
    held,
    new_log,
    old_log,
    payloads,
    records_after,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
RECORDS = records_after(LogEnd(), payloads(40))
BALLOT = Ballot(3, b"n" * 16)
SEGMENT_BYTES = 1 << 16


class HeldWorkers(ThreadWorkers):
    """One thread, which waits for `go` before it does anything."""

    def __init__(self) -> None:
        super().__init__(1)
        self.go = Event()
        self.go.set()
        self.calls = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        self.calls += 1

        def held_back(*values: *Ts) -> T:
            assert self.go.wait(60)
            return function(*values)

        return await super().run(held_back, *args)


@asynccontextmanager
async def running(workers: ThreadWorkers) -> AsyncIterator[Syncer]:
    syncer = Syncer(workers)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(syncer.run())
        yield syncer
        task.cancel()
    workers.close()


@pytest.fixture
def disk() -> FailingFileSystem:
    """The disk below all logs of a test."""
    return FailingFileSystem()


@pytest.fixture
def log(tmp_path: Path, disk: FailingFileSystem) -> MemberLog:
    """An empty log."""
    return new_log(tmp_path / "one", filesystem=disk, segment_bytes=SEGMENT_BYTES)


async def test_many_appends_share_a_sync(
    log: MemberLog, tmp_path: Path, disk: FailingFileSystem
) -> None:
    """Appends that are submitted during a sync share the next one, for each of two logs."""
    other = new_log(tmp_path / "two", filesystem=disk, segment_bytes=SEGMENT_BYTES)
    workers = HeldWorkers()
    async with running(workers) as syncer:
        await syncer.submit(log, [Write(RECORDS[:1]), Flush()])
        await syncer.submit(other, [Write(RECORDS[:1]), Flush()])
        workers.go.clear()
        first = syncer.submit(log, [Write(RECORDS[1:2]), Flush()])
        await asyncio.sleep(0)
        waiting = [syncer.submit(log, [Write((record,)), Flush()]) for record in RECORDS[2:]]
        waiting += [syncer.submit(other, [Write((record,)), Flush()]) for record in RECORDS[1:]]
        disk.calls.clear()
        workers.go.set()
        assert await first == 2
        assert await asyncio.gather(*waiting) == [40] * len(waiting)
    assert disk.calls.count("sync_data") == 3
    assert held(log) == held(other) == list(RECORDS)


async def test_nothing_is_acknowledged_before_it_is_durable(
    log: MemberLog, tmp_path: Path, disk: FailingFileSystem
) -> None:
    """Futures are done in order, each after the sync; another process then finds all records."""
    reported: list[int] = []
    async with running(ThreadWorkers(1)) as syncer:
        futures = []
        for record in RECORDS:
            future = syncer.submit(log, [Write((record,)), Flush()])
            future.add_done_callback(lambda _, lsn=record.lsn: reported.append(lsn))  # type: ignore[misc]
            futures.append(future)
            if record.lsn % 3 == 0:
                flushed = await future
                assert flushed >= record.lsn
                assert old_log(tmp_path / "one", segment_bytes=SEGMENT_BYTES).durable_lsn >= flushed
        await asyncio.gather(*futures)
    assert reported == [record.lsn for record in RECORDS]
    assert "sync_data" in disk.calls


async def test_effects_are_done_in_order(log: MemberLog, tmp_path: Path) -> None:
    """A truncation is applied after effects that were submitted before it, and before later
    ones.
    """
    other = records_after(RECORDS[4].mark, payloads(3), epoch=3)
    async with running(ThreadWorkers(1)) as syncer:
        futures = [
            syncer.submit(log, [Write(RECORDS[:9]), Flush()]),
            syncer.submit(log, [Truncate(RECORDS[4].mark), Save(BALLOT, LogHealth.SOUND), Flush()]),
            syncer.submit(log, [Write(other), Flush()]),
        ]
        assert await futures[-1] == 8
    assert held(log) == [*RECORDS[:5], *other]
    log.close()
    assert old_log(tmp_path / "one").recovered.promise == BALLOT


async def test_space_is_made_and_logs_are_trimmed(log: MemberLog, disk: FailingFileSystem) -> None:
    """Space is allocated in order with submitted effects; a full disk is reported, and the syncer
    goes on.
    """
    async with running(ThreadWorkers(1)) as syncer:
        assert not log.has_space(RECORDS[:1])
        assert await syncer.make_space(log, RECORDS[:1])
        assert log.has_space(RECORDS)
        cut = syncer.submit(log, [Write(RECORDS[:9]), Truncate(RECORDS[7].mark), Flush()])
        assert not log.has_space([])  # unknown until the effects are applied
        assert await syncer.make_space(log, RECORDS[8:])
        await cut
        await syncer.trim(log, RECORDS[3].mark)
        assert log.read(5, ALL, ALL) == list(RECORDS[4:8])
        large = records_after(RECORDS[7].mark, [bytes(2 * SEGMENT_BYTES)])
        disk.fail("allocate", errno.ENOSPC)
        assert not await syncer.make_space(log, large)
        assert await syncer.make_space(log, RECORDS[8:])
        disk.clear_failures()
        assert await syncer.make_space(log, large)
        assert await syncer.submit(log, [Write(large), Flush()]) == 9


async def test_the_next_segment_is_allocated_before_it_is_needed(log: MemberLog) -> None:
    """A log whose segment is half full has space for another whole one."""
    big = records_after(LogEnd(), [bytes(SEGMENT_BYTES // 2)])
    next_ones = records_after(big[-1].mark, [bytes(SEGMENT_BYTES // 2)])
    workers = HeldWorkers()
    async with running(workers) as syncer:
        await syncer.submit(log, [Write(big), Flush()])
        await syncer.submit(log, [Flush()])  # its turn comes after the allocation
        assert log.has_space(next_ones)


async def test_a_failed_sync_ends_it(log: MemberLog, disk: FailingFileSystem) -> None:
    """After a failed sync all waiting and all later jobs fail, and the task ends."""
    workers = HeldWorkers()
    syncer = Syncer(workers)
    with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012  (the block is what ends)
        async with asyncio.TaskGroup() as group:
            group.create_task(syncer.run())
            await syncer.submit(log, [Write(RECORDS[:1]), Flush()])
            workers.go.clear()
            disk.fail("sync_data", errno.EIO)
            first = syncer.submit(log, [Write(RECORDS[1:2]), Flush()])
            await asyncio.sleep(0)
            second = syncer.submit(log, [Write(RECORDS[2:3]), Flush()])
            workers.go.set()
            await asyncio.wait([first, second])
    assert raised.group_contains(StoreBroken)
    disk.clear_failures()
    for future in (first, second, syncer.submit(log, [Flush()])):
        with pytest.raises(StoreBroken):
            await future
    workers.close()


async def test_waiting_callers_are_cancelled_with_it(log: MemberLog) -> None:
    """When the task is cancelled, no caller waits forever, and the result of a running batch is not
    reported.
    """
    workers = HeldWorkers()
    async with running(workers) as syncer:
        workers.go.clear()
        first = syncer.submit(log, [Write(RECORDS[:1]), Flush()])
        await asyncio.sleep(0)
        second = syncer.submit(log, [Write(RECORDS[1:2]), Flush()])
        await asyncio.sleep(0)
        workers.go.set()
        second.cancel()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[1:])
    late = syncer.submit(log, [Flush()])
    assert late.cancelled()
