"""The end of a log: fenced, stopped, closed or cancelled, every write is settled once."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from shalekv.errors import (
    Fenced,
    NotACounter,
    OutcomeUnknown,
    Stopping,
    StoreBroken,
)
from shalekv.protocol.transaction import Add, Put, Transaction
from shalekv.read.read_set import ReadSet, VersionToken
from shalekv.write.commit import Commit, Receipt
from tests.kit.engine.commits import put, read
from tests.kit.engine.running_log import (
    NEWER,
    OLDER,
    TRANSACTION_BYTES,
    RunningLog,
    Settlement,
    quiesce,
    running,
)


async def test_uploads_in_flight_end_by_themselves_after_a_fence() -> None:
    """After a fence, uploads in flight that land are acknowledged; the others are logged."""
    async with running(RunningLog(k=4)) as log:
        await log.fill(10, NEWER)
        await log.fill(13, OLDER)
        writes = []
        for number in range(4):
            writes.append(log.write(b"%d" % number))
            await log.store.arrived(number + 1)
        log.store.held[0].release()
        assert isinstance(await writes[0].outcome(), Fenced)
        log.store.held[1].release()
        assert await writes[1].receipt() == Receipt(seq=101, wal_id=11)
        log.store.held[2].lose_reply()
        assert await writes[2].receipt() == Receipt(seq=102, wal_id=12)
        log.store.held[3].release()
        assert isinstance(await writes[3].outcome(), Fenced)
        assert read(log.memtable.view(102, 13)) == [(b"1", b"v"), (b"2", b"v")]
        assert (log.watermark.seq, log.watermark.wal_id) == (102, 13)


async def test_broken_disk_leaves_writes_unknown() -> None:
    """After a failed sync, writes in flight are unknown, and queued ones were not sent."""
    async with running(RunningLog()) as log:
        sent = log.write(b"a")
        held = await log.store.arrived(1)
        queued = log.write(b"b")
        held.break_disk()
        assert isinstance(await sent.outcome(), OutcomeUnknown)
        assert isinstance(await queued.outcome(), StoreBroken)
        assert isinstance(log.log.stopped_by, StoreBroken)


async def test_close_makes_durable_what_was_accepted() -> None:
    """After `close` nothing more is accepted, everything accepted is flushed, and `run` returns."""
    log = RunningLog(interval_ms=1e9)
    async with running(log):
        log.write(b"a")
        (await log.store.arrived(1)).release()
        spaced = log.write(b"b")
        await quiesce()
        assert len(log.store.held) == 1
        log.log.close()
        with pytest.raises(Stopping, match="shutting down"):
            log.admission.try_admit(1)
        (await log.store.arrived(2)).release()
        assert await spaced.receipt() == Receipt(seq=101, wal_id=11)
    assert log.log.is_closing


async def test_displacement_while_closing_loses_nothing() -> None:
    """A group that loses its slot to an older fence after `close` goes to the next slot."""
    async with running(RunningLog()) as log:
        await log.fill(10, OLDER)
        write = log.write(b"a")
        held = await log.store.arrived(1)
        log.log.close()
        held.release()
        (await log.store.arrived(2)).release()
        assert (await write.receipt()).wal_id == 11


async def test_closed_log_that_is_fenced_was_stopped() -> None:
    """A fence while closing is reported: not everything was made durable."""
    log = RunningLog()
    async with running(log):
        await log.fill(10, NEWER)
        write = log.write(b"a")
        held = await log.store.arrived(1)
        log.log.close()
        held.release()
        assert isinstance(await write.outcome(), Fenced)
    assert not log.log.is_closing
    assert isinstance(log.log.stopped_by, Fenced)


async def test_bug_in_an_upload_settles_everything() -> None:
    """An unexpected error ends the log with that error, and no caller waits for ever."""
    log = RunningLog(k=2)
    task = asyncio.create_task(log.log.run())
    first = log.write(b"a")
    await log.store.arrived(1)
    second = log.write(b"b")
    await log.store.arrived(2)
    queued = log.write(b"c")
    log.store.held[1].answer.set_exception(ZeroDivisionError())
    with pytest.raises(ExceptionGroup):
        await task
    for write in (first, second):
        assert isinstance(await write.outcome(), OutcomeUnknown)
    assert isinstance(await queued.outcome(), Stopping)
    log.check_settled()


async def test_error_of_a_stopped_log_does_not_grow() -> None:
    """The error that stopped the log keeps no frames of the callers that it was raised to."""
    log = RunningLog()
    log.log.stop(Stopping("the end"))
    depths = set()
    for _ in range(4):
        with pytest.raises(Stopping) as caught:
            log.log.submit(Commit([put(b"a")], log.log.next_seq, lambda _: None))
        depths.add(len(caught.traceback))
    assert len(depths) == 1


async def test_a_landed_commit_is_released() -> None:
    """An idle log holds no reference to the last commit, or to its read set."""
    async with running(RunningLog()) as log:
        read_set = ReadSet(VersionToken())
        token = weakref.ref(read_set.token)
        settlement = Settlement()
        assert log.admission.try_admit(TRANSACTION_BYTES)
        log.log.transact(
            Transaction([Put(b"a", b"1")]),
            settlement.settle,
            size_bytes=TRANSACTION_BYTES,
            read_set=read_set,
        )
        del read_set
        log.writes.append(settlement)
        (await log.store.arrived(1)).release()
        await settlement.receipt()
        log.store.held.clear()
        await quiesce()
        assert token() is None


async def test_a_kept_refusal_releases_its_read_set() -> None:
    """Keeping the error of a refused transaction does not keep its read set."""
    async with running(RunningLog()) as log:
        read_set = ReadSet(VersionToken())
        token = weakref.ref(read_set.token)
        settlement = Settlement()
        assert log.admission.try_admit(TRANSACTION_BYTES)
        no_counter = Transaction([Put(b"a", b"1"), Add(b"a", 1)])
        log.log.transact(
            no_counter, settlement.settle, size_bytes=TRANSACTION_BYTES, read_set=read_set
        )
        del read_set
        refusal = await settlement.refusal()
        await quiesce()
        assert isinstance(refusal, NotACounter)
        assert token() is None
