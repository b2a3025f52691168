"""Reads of safekeepers: their logs, notifications of the archive, and relays between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from shalekv.errors import RecordTrimmed
from shalekv.protocol.quorum_records import Append, Appended, Archived, Record, RelayTarget
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.write.quorum.links import LinkBroken, TailPiece
from tests.kit.constants import set_constants
from tests.kit.quorum.safekeepers import DATABASE_ID, DEADLINE_S, Safekeeper, Writer, safekeeper
from tests.servers.process import free_ports

PIECE_BYTES = 4_096
PROPOSE = "shalekv.server.safekeeper.propose"


async def fetched(it: Safekeeper, member_id: bytes, first_lsn: int = 1) -> list[list[Record]]:
    pieces = it.links.fetch(it.address, DATABASE_ID, member_id, first_lsn)
    return [[*records] async for records in pieces]


class TailCall:
    """A tail, and the records that it has sent."""

    def __init__(self, it: Safekeeper, first_wal_id: int = 0) -> None:
        self._pieces = it.links.tail(it.address, DATABASE_ID, first_wal_id)
        self.records: list[Record] = []

    async def next(self) -> TailPiece:
        async with asyncio.timeout(DEADLINE_S):
            piece = await anext(self._pieces)
        self.records += piece.records
        return piece

    async def until(self, lsn: int) -> None:
        while not self.records or self.records[-1].lsn < lsn:
            await self.next()

    async def close(self) -> None:
        await closed(self._pieces)


async def closed(pieces: AsyncIterator[object]) -> None:
    assert isinstance(pieces, AsyncGenerator)
    await pieces.aclose()


async def filled(it: Safekeeper, count: int = 20, size_bytes: int = 1_000) -> Writer:
    """A writer that has appended records, none of which is committed."""
    writer = await it.lead(1)
    await writer.append(*(b"%d" % number * size_bytes for number in range(count)))
    return writer


async def test_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch returns all records from one on, committed or not, in pieces of bounded size."""
    set_constants(monkeypatch, {f"{PROPOSE}:TAIL_MESSAGE_BYTES_MAX": PIECE_BYTES})
    async with safekeeper(tmp_path) as it:
        member_id = await it.admit()
        writer = await filled(it)
        pieces = await fetched(it, member_id)
        assert [record for piece in pieces for record in piece] == writer.records
        assert len(pieces) > 1
        assert all(sum(len(r.payload) for r in piece) <= PIECE_BYTES for piece in pieces)
        rest = [record for piece in await fetched(it, member_id, 15) for record in piece]
        assert rest == writer.records[14:]
        assert await fetched(it, member_id, 21) == []


async def test_tail_sends_committed_records_only(tmp_path: Path) -> None:
    """A tail sends records when they are committed, once each, and no others."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await filled(it, 5)
        tail = TailCall(it)
        assert await tail.next() == TailPiece((), 0)
        await writer.commit(3)
        await tail.until(3)
        assert tail.records == writer.records[:3]
        await writer.append(b"more", committed_lsn=5)
        await tail.until(5)
        assert tail.records == writer.records[:5]
        await tail.close()


async def test_tail_from_an_object(tmp_path: Path) -> None:
    """A tail begins with the first record of the requested object."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        records = [
            *writer.make(b"0", b"0", ends_object=False),
            *writer.make(b"0"),
            *writer.make(b"1", b"1", ends_object=False),
        ]
        assert [record.wal_id for record in records] == [0, 0, 0, 1, 1]
        await writer.send(records, committed_lsn=5)
        tail = TailCall(it, 1)
        await tail.until(5)
        assert tail.records == records[3:]
        await tail.close()
        later = TailCall(it, 2)
        assert await later.next() == TailPiece((), 5)
        await writer.send(writer.make(b"1"))
        await writer.send(writer.make(b"2"))
        await writer.commit(7)
        await later.until(7)
        assert [record.wal_id for record in later.records] == [2]
        await later.close()


async def test_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are only in the archive are refused, also to a tail that is too slow."""
    set_constants(monkeypatch, {f"{PROPOSE}:TAIL_HEARTBEAT_MS": 10})
    async with safekeeper(tmp_path) as it:
        member_id = await it.admit()
        writer = await filled(it, 10)
        await writer.commit(10)
        slow = TailCall(it)
        await slow.until(10)
        member = it.node.find(DATABASE_ID)
        await member.note_archived(4, writer.records[4].mark)
        with pytest.raises(RecordTrimmed):
            await TailCall(it, 4).next()
        with pytest.raises(RecordTrimmed):
            await fetched(it, member_id, 5)
        pieces = await fetched(it, member_id, 6)
        assert [record for piece in pieces for record in piece] == writer.records[5:]
        tail = TailCall(it, 5)
        await tail.until(10)
        assert tail.records == writer.records[5:]
        [status] = (await it.links.status(it.address)).members
        assert (status.log.base, status.archived_wal_id) == (writer.records[4].mark, 4)
        await tail.close()
        await slow.close()


async def test_tail_ends_with_the_node(tmp_path: Path) -> None:
    """A node that shuts down ends its tails, and a replica goes on with another node."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        tail = TailCall(it)
        await tail.next()
        it.node.close()
        with pytest.raises(LinkBroken, match="shutting down"):
            await tail.next()


@asynccontextmanager
async def safekeepers(folder: Path, count: int) -> AsyncIterator[Sequence[Safekeeper]]:
    async with AsyncExitStack() as stack:
        them = []
        for number in range(count):
            path = folder / f"{number}"
            path.mkdir()
            it = await stack.enter_async_context(safekeeper(path))
            await it.admit()
            them.append(it)
        yield them


async def led(them: Sequence[Safekeeper], epoch: int = 1) -> list[Writer]:
    return [await it.lead(epoch) for it in them]


async def pass_on(links: GrpcLinks, to: Writer, append: Append, *, then: Append) -> None:
    """Relay `append` and then `then` to a member, as another safekeeper would."""
    link = await links.relay(to.address)
    await link.send(DATABASE_ID, b"?" * 16, append)  # for a member that is not there
    await link.send(DATABASE_ID, to.member_id, append)
    await link.send(DATABASE_ID, to.member_id, then)


async def test_writers_are_notified_of_the_archive(tmp_path: Path) -> None:
    """A writer is notified when the archive has grown, and once after each election."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        assert await writer.append(b"one") == Appended(writer.ballot, 1)
        member = it.node.find(DATABASE_ID)
        await member.note_archived(0, member.state.log.base)
        assert await writer.hear() == Archived(writer.ballot, 0)
        assert await writer.append(b"two") == Appended(writer.ballot, 2, 0)
        await member.note_archived(0, member.state.log.base)
        await member.note_archived(1, member.state.log.base)
        assert await writer.hear() == Archived(writer.ballot, 1)
        after = await it.lead(2, writer.log)
        assert await after.hear() == Archived(after.ballot, 1)
        assert await after.append(b"three") == Appended(after.ballot, 3, 1)


async def test_a_chain(tmp_path: Path) -> None:
    """A record is relayed along the chain, and each member replies to the writer."""
    async with safekeepers(tmp_path, 3) as them:
        first, *others = await led(them)
        for payload in (b"one", bytes(3 << 20), b"three"):
            records = first.make(payload)
            reply = await first.send(records, committed_lsn=records[0].lsn - 1, relays=others)
            assert reply == Appended(first.ballot, records[0].lsn)
            for other in others:
                assert await other.hear() == reply
        for it in them:
            state = it.node.find(DATABASE_ID).state
            assert (state.log, state.committed_lsn) == (first.log, 2)


async def test_a_relay_of_an_old_leader(tmp_path: Path) -> None:
    """A relayed append counts only for its member, and only of the writer that is elected."""
    async with safekeepers(tmp_path, 1) as [it]:
        old = await it.lead(1)
        old.make(b"one")
        await old.send(old.records)
        late = Append(old.ballot, old.make(b"late"), 2)
        new = await it.lead(2, it.node.find(DATABASE_ID).state.log)
        [record] = new.make(b"two")
        await pass_on(it.links, new, late, then=Append(new.ballot, (record,), 0))
        assert await new.hear() == Appended(new.ballot, 2)
        state = it.node.find(DATABASE_ID).state
        assert (state.log, state.committed_lsn) == (new.log, 0)


async def test_a_commit_point_is_broadcast(tmp_path: Path) -> None:
    """A member that learns a commit point from the writer sends it to the peers that it names."""
    async with safekeepers(tmp_path, 3) as them:
        first, *others = streams = await led(them)
        records = first.make(b"one")
        for stream in streams:
            await stream.send(records)
        peers = tuple(RelayTarget(each.member_id, each.address) for each in others)
        await first.link.send(Append(first.ballot, (), 1, commit_peers=peers))
        for it in them:
            assert await it.node.find(DATABASE_ID).wait_committed(0) == 1


async def test_unreachable_member_of_a_chain(tmp_path: Path) -> None:
    """A member that is not reached delays neither the writer nor the others."""
    async with safekeepers(tmp_path, 2) as them:
        first, second = await led(them)
        gone = Writer(first.link, first.ballot)
        [port] = free_ports(1)
        gone.member_id, gone.address = b"g" * 16, f"127.0.0.1:{port}"
        for payload in (b"one", b"two"):
            records = first.make(payload)
            reply = await first.send(records, relays=[gone, second])
            assert reply == Appended(first.ballot, records[0].lsn)
        assert await second.send(first.records) == Appended(second.ballot, 2)
