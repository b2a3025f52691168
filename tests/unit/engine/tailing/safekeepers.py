"""Safekeepers in this process: the acceptors of the core, records in memory, links that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from shalekv.core.quorum.acceptor import (
    AcceptorState,
    Reply,
    Reset,
    Truncate,
    Write,
    archived,
    step,
)
from shalekv.core.quorum.membership import Member
from shalekv.core.quorum.messages import ToAcceptor, ToProposer
from shalekv.core.quorum.record import Mark, Record
from shalekv.engine.quorum.links import (
    DatabasePlace,
    Link,
    LinkBroken,
    MemberStatus,
    NodeStatus,
    TailPiece,
)
from shalekv.errors import NotAMember, RecordTrimmed

HEARTBEAT_S = 1.0


class Safekeeper:
    """One member, in the hands of the test."""

    def __init__(self, number: int) -> None:
        self.member = Member(bytes([number]) * 16, f"safekeeper{number}:7")
        self.state = AcceptorState(self.member.id)
        self.records: dict[int, Record] = {}
        self.is_up = True  # readers reach it
        self.hears = True  # the writer reaches it
        self.is_silent = False  # it takes connections, and never answers
        self.tails = 0  # that go on
        self.tails_begun = 0
        self.pieces_max: int | None = None  # a tail breaks behind so many
        self._changed = asyncio.Event()

    def receive(self, message: ToAcceptor) -> ToProposer | None:
        """Do what the acceptor says."""
        self.state, effects = step(self.state, 1, message)
        reply = None
        for effect in effects:
            match effect:
                case Write():
                    self.records |= {record.lsn: record for record in effect.records}
                case Truncate():
                    self._keep(lambda lsn, last=effect.last.lsn: lsn <= last)
                case Reset():
                    self.records.clear()
                case Reply():
                    reply = effect.message
        self.wake()
        return reply

    def trim(self, wal_id: int, base: Mark) -> None:
        """All objects up to `wal_id` were seen in the archive."""
        self.state = archived(self.state, wal_id, base)
        self._keep(lambda lsn: lsn > self.state.log.base.lsn)
        self.wake()

    def wake(self) -> None:
        """Let tails see what has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def break_tails(self) -> None:
        """End them all."""
        self.tails_begun += 1_000
        self.wake()

    def _keep(self, keeps: object) -> None:
        self.records = {lsn: r for lsn, r in self.records.items() if keeps(lsn)}  # type: ignore[operator]

    async def tail(self, first_wal_id: int) -> AsyncGenerator[TailPiece, None]:
        """Committed records, without end."""
        self.tails_begun += 1
        era = self.tails_begun // 1_000
        log = self.state.log
        if first_wal_id < log.base.next_wal_id:
            raise RecordTrimmed("trimmed")
        lsns = [lsn for lsn, record in self.records.items() if record.wal_id >= first_wal_id]
        next_lsn = min(lsns, default=log.last.lsn + 1)
        self.tails += 1
        pieces = 0
        try:
            yield TailPiece((), self.state.committed_lsn)
            while True:
                pieces += 1
                if self.pieces_max is not None and pieces > self.pieces_max:
                    raise LinkBroken("so many pieces, and no more")
                told = await self._told(next_lsn, era)
                next_lsn += len(told)
                yield TailPiece(told, self.state.committed_lsn)
        finally:
            self.tails -= 1

    async def _told(self, next_lsn: int, era: int) -> Sequence[Record]:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                while True:
                    if not self.is_up or self.is_silent or self.tails_begun // 1_000 != era:
                        if self.is_silent:
                            await asyncio.Event().wait()
                        raise LinkBroken("away")
                    if next_lsn <= self.state.log.base.lsn:
                        raise RecordTrimmed("trimmed")
                    committed = range(next_lsn, self.state.committed_lsn + 1)
                    if committed:
                        return [self.records[lsn] for lsn in committed[:3]]
                    await self._changed.wait()
        except TimeoutError:
            return []


class LocalLinks:
    """`Links` to safekeepers of this process."""

    def __init__(self, keepers: Sequence[Safekeeper], place: DatabasePlace) -> None:
        self._keepers = {keeper.member.address: keeper for keeper in keepers}
        self._place = place
        self.asked = 0  # requests for a status

    def add(self, keeper: Safekeeper) -> None:
        """One more."""
        self._keepers[keeper.member.address] = keeper

    async def connect(self, address: str, place: DatabasePlace) -> Link:
        """The writer of these tests needs no link."""
        del place
        raise LinkBroken(f"{address}: safekeepers of these tests are only read")

    async def fetch(
        self, address: str, database_id: bytes, member_id: bytes, first_lsn: int
    ) -> AsyncIterator[Sequence[Record]]:
        """What is there."""
        del database_id, member_id
        records = self._find(address).records
        yield [records[lsn] for lsn in sorted(records) if lsn >= first_lsn]

    async def tail(
        self, address: str, database_id: bytes, first_wal_id: int
    ) -> AsyncIterator[TailPiece]:
        """As `Links.tail`."""
        keeper = self._find(address)
        if database_id != self._place.database_id:
            raise NotAMember("another database")
        pieces = keeper.tail(first_wal_id)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def admit(self, address: str, place: DatabasePlace, request_id: bytes) -> bytes:
        """Members are made by the tests."""
        del place, request_id
        raise LinkBroken(f"{address}: safekeepers of these tests are only read")

    async def status(self, address: str, database_id: bytes = b"") -> NodeStatus:
        """As `Links.status`."""
        self.asked += 1
        keeper = self._find(address)
        if keeper.is_silent:
            await asyncio.Event().wait()
        state = keeper.state
        status = MemberStatus(
            DatabasePlace(database_id, self._place.url),
            keeper.member.id,
            state.promise,
            state.health,
            state.log,
            state.committed_lsn,
            state.archived_wal_id,
            log_bytes=0,
            is_archiver=False,
        )
        return NodeStatus("", [status], 0)

    async def retire(self, address: str, database_id: bytes, member_id: bytes) -> None:
        """Members are deleted by the tests."""
        del database_id, member_id
        raise LinkBroken(f"{address}: safekeepers of these tests are only read")

    async def close(self) -> None:
        """There is nothing to end."""

    def _find(self, address: str) -> Safekeeper:
        keeper = self._keepers.get(address)
        if keeper is None or not keeper.is_up:
            raise LinkBroken(f"{address} is away")
        return keeper
