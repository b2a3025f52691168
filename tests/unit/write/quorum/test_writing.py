"""Writing through safekeepers with slow, full or lost members, and appointing the archiver."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import LogFull, OutcomeUnknown, QuorumUnavailable, ShaleError
from shalekv.protocol.quorum_records import Elected
from shalekv.protocol.transaction import Put, Transaction
from shalekv.read.read_set import ReadSet, VersionToken
from shalekv.settings import KIB
from shalekv.write.commit import Receipt
from tests.kit.constants import set_constants
from tests.kit.cycles import cycles_of
from tests.kit.engine.running_log import TRANSACTION_BYTES, Write
from tests.kit.quorum.log import QuorumDatabase, Writing, until
from tests.kit.virtual_time import virtual_time


async def waits_for(writing: Writing) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    writing.engine.log.pending_replies.begin(future)
    return future


@virtual_time(5)
async def test_writes_resume_when_a_lost_majority_returns() -> None:
    """Without a majority, calls end as unknown and new writes are refused; with it, all resumes."""
    database = await QuorumDatabase.created()
    async with database.writing() as writing:
        await writing.put(b"a")
        for address in ("n1:1", "n2:1"):
            database.nodes[address].hold()
        write = writing.write(b"b")
        waiting = await waits_for(writing)
        with pytest.raises(OutcomeUnknown):
            await waiting
        with pytest.raises(QuorumUnavailable, match="no majority"):
            writing.write(b"c")
        assert not write.outcomes
        assert [key for key, _ in await writing.contents()] == [b"a"]
        database.nodes["n1:1"].release_all()
        assert isinstance(await write.outcome(), Receipt)
        await writing.put(b"d")
        assert [key for key, _ in await writing.contents()] == [b"a", b"b", b"d"]
        database.nodes["n2:1"].release_all()


def _refuses(writing: Writing, why: type[ShaleError]) -> bool:
    return isinstance(writing.slots.refusal, why)


@virtual_time(5)
async def test_slow_member_is_not_waited_for_and_catches_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent member is sent no more than its queue holds, and the rest when it answers."""
    database = await QuorumDatabase.created()
    slow = database.log("n3:1")
    set_constants(monkeypatch, {"shalekv.write.quorum.peer:SEND_QUEUE_BYTES_MAX": 64 * KIB})
    async with database.writing() as writing:
        await writing.put(b"a")
        await until(lambda: slow.state.log.last.lsn >= 2)
        database.nodes["n3:1"].hold()
        for number in range(20):
            await writing.put(b"k%02d" % number, bytes(10 * KIB))
        behind = slow.state.log.last.lsn
        assert behind < writing.committed_lsn - 5
        database.nodes["n3:1"].release_all()
        await until(lambda: slow.state.log.last.lsn >= writing.committed_lsn)
        elected = [m for m in writing.links.sent["n3:1"] if isinstance(m, Elected)]
        assert len(elected) <= 2


@virtual_time(5)
async def test_member_behind_the_memory_of_the_writer_begins_anew() -> None:
    """A member that lacks dropped records is reset to what follows the archive, and goes on."""
    database = await QuorumDatabase.created()
    gone = database.log("n3:1")
    async with database.writing(unarchived_log_bytes_max=256 * KIB) as writing:
        await writing.put(b"a")
        database.nodes["n3:1"].stop()
        for number in range(40):
            await writing.put(b"k%02d" % number, bytes(20 * KIB))
        await writing.slots.archive()
        database.nodes["n3:1"].start()
        await until(lambda: gone.state.log.last.lsn >= writing.committed_lsn)
        assert gone.state.log.base.lsn > 2
        await writing.put(b"z")
    database.nodes["n1:1"].stop()
    async with database.writing() as writing:
        assert len(await writing.contents()) == 42


async def _check_that_a_refusal_keeps_nothing(writing: Writing) -> None:
    """A read set that the error kept would keep the memtable from dropping what is compacted."""
    log = writing.engine.log

    async def refused() -> None:
        assert writing.engine.admission.try_admit(TRANSACTION_BYTES)
        with suppress(LogFull):
            log.transact(
                Transaction([Put(b"t", b"1")]),
                lambda _: None,
                size_bytes=TRANSACTION_BYTES,
                read_set=ReadSet(VersionToken()),
            )

    assert "ReadSet" not in await cycles_of(refused)


@virtual_time(5)
async def test_full_majority_refuses_and_goes_on_by_itself() -> None:
    """Writes are refused with a retry delay while a majority is full, and accepted afterwards."""
    database = await QuorumDatabase.created()
    async with database.writing() as writing:
        await writing.put(b"a")
        for address in ("n1:1", "n2:1"):
            database.log(address).has_space = False
        writes = [writing.write(b"b%d" % number) for number in range(3)]
        await until(lambda: _refuses(writing, LogFull))
        await _check_that_a_refusal_keeps_nothing(writing)
        database.log("n2:1").has_space = True
        for write in writes:
            await write.receipt()
        await writing.put(b"c")
        database.log("n1:1").has_space = True
        await until(lambda: database.log("n1:1").state.log.last.lsn >= writing.committed_lsn)


@virtual_time(5)
async def test_memory_for_what_is_not_archived_is_bounded() -> None:
    """Without an archive, writes wait at the bound, then are refused, and calls end as unknown.

    With an archive, writes resume.
    """
    database = await QuorumDatabase.created()
    async with database.writing(unarchived_log_bytes_max=256 * KIB) as writing:
        await writing.put(b"a")
        database.let_archive(False)
        writes: list[Write] = []
        while not any(not write.outcomes for write in writes[-3:-1]):
            writes.append(writing.write(b"k%02d" % len(writes), bytes(64 * KIB)))
            await LoopClock().sleep_ms(20)
        waiting = await waits_for(writing)
        await until(lambda: _refuses(writing, LogFull))
        with pytest.raises(OutcomeUnknown):
            await waiting
        report = writing.slots.report()
        assert 256 * KIB <= report.unarchived_bytes < 330 * KIB
        database.let_archive(True)
        for write in writes:
            await write.receipt()
        assert not _refuses(writing, LogFull)


@pytest.mark.parametrize(("pause_ms", "waiting"), [(250, 1), (30, 5)])
@virtual_time(2)
async def test_stop_at_the_memory_bound_leaves_a_log_that_can_be_archived(
    pause_ms: int, waiting: int
) -> None:
    """Stopping a writer that waits for memory leaves no object that cannot be archived.

    Groups that wait are given up. The record that ends an object waits behind them, and must not
    end an object that no record has begun.
    """
    database = await QuorumDatabase.created()
    async with database.writing(unarchived_log_bytes_max=256 * KIB) as writing:
        await writing.put(b"a")
        await writing.slots.archive()
        database.let_archive(False)
        writes: list[Write] = []
        while sum(not write.outcomes for write in writes) < waiting:
            writes.append(writing.write(b"b%02d" % len(writes), bytes(40 * KIB)))
            await LoopClock().sleep_ms(pause_ms)
        await LoopClock().sleep_ms(500)
    acknowledged = {
        write.changes[0].key for write in writes if isinstance(write.outcomes[0], Receipt)
    }
    database.let_archive(True)
    async with database.writing() as writing:
        await writing.put(b"c")
        await writing.slots.archive()
        assert {b"a", b"c"} | acknowledged <= {key for key, _ in await writing.contents()}


@virtual_time(5)
async def test_another_archiver_is_appointed() -> None:
    """An archiver that archives nothing for a time, although something waits, is replaced."""
    database = await QuorumDatabase.created()
    async with database.writing() as writing:
        await writing.put(b"a")
        await until(lambda: any(kept.is_archiver for kept in database.logs()))
        (lazy,) = [kept for kept in database.logs() if kept.is_archiver]
        lazy.can_archive = False
        await writing.put(b"b")
        await until(lambda: any(k.is_archiver for k in database.logs() if k is not lazy))
        await writing.slots.archive()
        await until(lambda: not lazy.is_archiver)
