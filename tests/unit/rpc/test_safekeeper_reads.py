"""Fetch and tail of a safekeeper, over real sockets and real files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from shalekv.core.quorum.record import Record
from shalekv.engine.quorum.links import LinkBroken, TailPiece
from shalekv.errors import RecordTrimmed
from tests.kit.quorum.safekeepers import DATABASE_ID, DEADLINE_S, Safekeeper, Writer, safekeeper

PIECE_BYTES = 4_096


async def fetched(it: Safekeeper, member_id: bytes, first_lsn: int = 1) -> list[list[Record]]:
    """All pieces of a fetch."""
    pieces = it.links.fetch(it.address, DATABASE_ID, member_id, first_lsn)
    return [[*records] async for records in pieces]


class Tailing:
    """A tail, and what it has told."""

    def __init__(self, it: Safekeeper, first_wal_id: int = 0) -> None:
        """It has asked for nothing yet."""
        self._pieces = it.links.tail(it.address, DATABASE_ID, first_wal_id)
        self.records: list[Record] = []

    async def next(self) -> TailPiece:
        """The next piece."""
        async with asyncio.timeout(DEADLINE_S):
            piece = await anext(self._pieces)
        self.records += piece.records
        return piece

    async def until(self, lsn: int) -> None:
        """Take pieces until this record was told."""
        while not self.records or self.records[-1].lsn < lsn:
            await self.next()

    async def close(self) -> None:
        """Take no more."""
        await closed(self._pieces)


async def closed(pieces: AsyncIterator[object]) -> None:
    """Close a generator."""
    assert isinstance(pieces, AsyncGenerator)
    await pieces.aclose()


async def filled(it: Safekeeper, count: int = 20, size_bytes: int = 1_000) -> Writer:
    """A writer that has appended records, none of which is committed."""
    writer = await it.lead(1)
    await writer.append(*(b"%d" % number * size_bytes for number in range(count)))
    return writer


async def test_fetch(tmp_path: Path) -> None:
    """A fetch gives all records from one on, committed or not, in pieces of bounded size."""
    async with safekeeper(tmp_path, piece_bytes_max=PIECE_BYTES) as it:
        member_id = await it.admit()
        writer = await filled(it)
        pieces = await fetched(it, member_id)
        assert [record for piece in pieces for record in piece] == writer.records
        assert len(pieces) > 1
        assert all(sum(len(r.payload) for r in piece) <= PIECE_BYTES for piece in pieces)
        rest = [record for piece in await fetched(it, member_id, 15) for record in piece]
        assert rest == writer.records[14:]
        assert await fetched(it, member_id, 21) == []


async def test_tail_tells_only_what_is_committed(tmp_path: Path) -> None:
    """A tail tells committed records as they become so, once each, and no others."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await filled(it, 5)
        tail = Tailing(it)
        assert await tail.next() == TailPiece((), 0)
        await writer.commit(3)
        await tail.until(3)
        assert tail.records == writer.records[:3]
        await writer.append(b"more", committed_lsn=5)
        await tail.until(5)
        assert tail.records == writer.records[:5]
        await tail.close()


async def test_tail_from_an_object(tmp_path: Path) -> None:
    """A tail begins with the first record of the object that it was asked for."""
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
        tail = Tailing(it, 1)
        await tail.until(5)
        assert tail.records == records[3:]
        await tail.close()
        later = Tailing(it, 2)
        assert await later.next() == TailPiece((), 5)
        await writer.send(writer.make(b"1"))
        await writer.send(writer.make(b"2"))
        await writer.commit(7)
        await later.until(7)
        assert [record.wal_id for record in later.records] == [2]
        await later.close()


async def test_trimmed(tmp_path: Path) -> None:
    """What is only in the archive any more is refused, also to a tail that is too slow."""
    async with safekeeper(tmp_path, tail_heartbeat_ms=10) as it:
        member_id = await it.admit()
        writer = await filled(it, 10)
        await writer.commit(10)
        slow = Tailing(it)
        await slow.until(10)
        member = it.node.find(DATABASE_ID)
        await member.note_archived(4, writer.records[4].mark)
        with pytest.raises(RecordTrimmed):
            await Tailing(it, 4).next()
        with pytest.raises(RecordTrimmed):
            await fetched(it, member_id, 5)
        pieces = await fetched(it, member_id, 6)
        assert [record for piece in pieces for record in piece] == writer.records[5:]
        tail = Tailing(it, 5)
        await tail.until(10)
        assert tail.records == writer.records[5:]
        [status] = (await it.links.status(it.address)).members
        assert (status.log.base, status.archived_wal_id) == (writer.records[4].mark, 4)
        await tail.close()
        await slow.close()


async def test_tail_ends_with_the_node(tmp_path: Path) -> None:
    """A node that shuts down ends its tails, and whoever follows goes to another."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        tail = Tailing(it)
        await tail.next()
        it.node.close()
        with pytest.raises(LinkBroken, match="shutting down"):
            await tail.next()
