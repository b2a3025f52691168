"""The protocol between a writer and a safekeeper, over real sockets and real files."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.core.quorum.messages import (
    Append,
    Appended,
    Greet,
    Joined,
    Refusal,
    Vote,
)
from shalekv.core.quorum.record import Ballot, Mark
from shalekv.engine.quorum.links import LinkBroken
from shalekv.errors import BadChecksum, NotAMember
from shalekv.store.filesystem import FileSystem
from tests.kit.quorum.safekeepers import (
    DATABASE_ID,
    DEADLINE_S,
    Writer,
    flushed_lsn,
    last_of,
    safekeeper,
)

SECOND = Ballot(2, b"2" * 16)


class HeldFileSystem(FileSystem):
    """Syncs of data wait while they are held."""

    def __init__(self) -> None:
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.is_waiting = threading.Event()

    def sync_data(self, descriptor: int) -> None:
        if not self.may_sync.is_set():
            self.is_waiting.set()
            assert self.may_sync.wait(DEADLINE_S)
        super().sync_data(descriptor)


async def test_two_streams(tmp_path: Path) -> None:
    """What comes late on a stream that is not the elected one any more changes nothing (CE10)."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        old = await it.lead(1)
        records = old.make(b"one", b"two", b"three")
        assert flushed_lsn(await old.send(records[:2])) == 2
        again = Writer(await it.connect(), old.ballot, old.log)
        await again.greet()
        assert await again.elect() == Joined(old.ballot, 2)
        late = await old.send(records[2:])
        assert isinstance(late, Refusal)
        assert "stream" in late.problem
        assert isinstance(await old.elect(), Refusal)
        assert flushed_lsn(await again.send(records[2:])) == 3


@pytest.mark.parametrize("recent_bytes_max", [0, 300, 1 << 20])
async def test_new_writer_truncates(tmp_path: Path, recent_bytes_max: int) -> None:
    """What the elected log does not have is cut off, and what it has stays."""
    async with safekeeper(tmp_path, recent_bytes_max=recent_bytes_max) as it:
        await it.admit()
        old = await it.lead(1)
        await old.append(b"one", b"two", b"three")
        elected = old.log.truncated(old.records[0].mark)
        new = Writer(await it.connect(), SECOND, elected)
        await new.greet()
        assert await new.elect() == Joined(SECOND, 1)
        assert flushed_lsn(await new.append(b"other")) == 2
        pieces = it.links.fetch(it.address, DATABASE_ID, new.member_id, 1)
        held = [record.payload async for records in pieces for record in records]
        assert held == [b"one", b"other"]


async def test_only_after_the_sync(tmp_path: Path) -> None:
    """An append is answered when it is on the disk and not before; others are taken meanwhile."""
    files = HeldFileSystem()
    async with safekeeper(tmp_path, filesystem=files) as it:
        await it.admit()
        writer = await it.lead(1)
        files.may_sync.clear()
        for payload in (b"one", b"two"):
            await writer.link.send(Append(writer.ballot, writer.make(payload), 0))
        receiving = asyncio.create_task(writer.link.receive())
        assert await asyncio.to_thread(files.is_waiting.wait, DEADLINE_S)
        member = it.node.find(it.place().database_id)
        while member.state.log.last.lsn < 2:  # noqa: ASYNC110 - both are to be taken
            await asyncio.sleep(0)
        assert not receiving.done()
        files.may_sync.set()
        async with asyncio.timeout(DEADLINE_S):
            assert flushed_lsn(await receiving) == 1
            assert flushed_lsn(await writer.link.receive()) == 2


async def test_vote_waits_for_the_disk(tmp_path: Path) -> None:
    """A vote is given when the appends before it and the promise are on the disk (CE9)."""
    files = HeldFileSystem()
    async with safekeeper(tmp_path, filesystem=files) as it:
        await it.admit()
        old = await it.lead(1)
        new = Writer(await it.connect(), SECOND)
        await new.greet()
        files.may_sync.clear()
        await old.link.send(Append(old.ballot, old.make(b"one"), 0))
        assert await asyncio.to_thread(files.is_waiting.wait, DEADLINE_S)
        voting = asyncio.create_task(new.vote())
        member = it.node.find(it.place().database_id)
        while member.state.promise != SECOND:  # noqa: ASYNC110 - it is seen from outside alone
            await asyncio.sleep(0)
        assert not voting.done()
        files.may_sync.set()
        vote = await voting
        assert isinstance(vote, Vote)
        assert vote.log.last == last_of(old.records)


async def test_full_log(tmp_path: Path) -> None:
    """When too much is not archived, appends are refused; votes and commit points are not."""
    async with safekeeper(tmp_path, unarchived_bytes_max=16 << 20) as it:
        await it.admit()
        writer = await it.lead(1)
        payload = bytes(6 << 20)
        assert await writer.append(payload, payload) == Appended(writer.ballot, 2)
        refused = writer.make(payload)
        assert await writer.send(refused, committed_lsn=2) == Appended(
            writer.ballot, 2, None, is_full=True
        )
        [status] = (await it.links.status(it.address)).members
        assert status.committed_lsn == 2
        other = Writer(await it.connect(), SECOND)
        await other.greet()
        assert isinstance(await other.vote(), Vote)


async def test_an_idle_writer_is_told(tmp_path: Path) -> None:
    """A writer that says nothing hears at once that another was promised to be followed."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        old = await it.lead(1)
        new = Writer(await it.connect(), SECOND)
        await new.greet()
        assert isinstance(await new.vote(), Vote)
        async with asyncio.timeout(DEADLINE_S):
            told = await old.link.receive()
        assert isinstance(told, Refusal)
        assert told.promise == SECOND


async def test_end_of_the_stream(tmp_path: Path) -> None:
    """Closing a link wakes who waits on it, and what it had said counts no more."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        receiving = asyncio.create_task(writer.link.receive())
        await asyncio.sleep(0)
        await writer.link.close()
        with pytest.raises(LinkBroken):
            await receiving
        with pytest.raises(LinkBroken):
            await writer.link.send(Greet())
        member = it.node.find(it.place().database_id)
        async with asyncio.timeout(DEADLINE_S):
            while member.state.leader is not None:  # noqa: ASYNC110 - it is seen from outside alone
                await asyncio.sleep(0)


async def test_unknown_database(tmp_path: Path) -> None:
    """A safekeeper without a log of the database says so."""
    async with safekeeper(tmp_path) as it:
        link = await it.connect()
        await link.send(Greet())
        with pytest.raises(NotAMember, match="no log of the database"):
            await link.receive()


async def test_damaged_on_the_way(tmp_path: Path) -> None:
    """A record that does not match its checksum is refused, and changes nothing."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        [record] = writer.make(b"one")
        damaged = replace(record, payload=b"two")
        await writer.link.send(Append(writer.ballot, (damaged,), 0))
        with pytest.raises(BadChecksum):
            await writer.link.receive()
        assert it.node.find(it.place().database_id).state.log.last == Mark()
