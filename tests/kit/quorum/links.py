"""Links to the safekeepers of a test, in its own process: in order, or broken.

Each writer has links of its own, so that one can be cut off from nodes that others still reach.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from shalekv.errors import InvalidRequest, NotAMember, RecordTrimmed
from shalekv.protocol.quorum_records import Append, Record, ToAcceptor, ToProposer
from shalekv.write.quorum.links import (
    DatabasePlace,
    Link,
    LinkBroken,
    NodeStatus,
    TailPiece,
)
from tests.kit.quorum.nodes import KeptLog, Node, Nodes

HEARTBEAT_S = 1.0  # of a tail


class InProcessLink:
    """A stream to one member."""

    def __init__(self, node: Node, kept: KeptLog, sent: list[ToAcceptor]) -> None:
        self.node = node
        self.is_broken = False
        self._kept = kept
        self._sent = sent
        self._stream = node.new_stream()
        self._replies: deque[ToProposer] = deque()
        self._wake = asyncio.Event()
        node.wakes.add(self._wake)
        kept.replies[self._stream] = self._take

    async def send(self, message: ToAcceptor) -> None:
        await asyncio.sleep(0)
        self._check()
        self._sent.append(message)
        self._kept.receive(self._stream, message)

    async def receive(self) -> ToProposer:
        """The next reply, when the node lets it out."""
        while True:
            self._wake.clear()
            self._check()
            if self._replies and not self.node.is_held:
                return self._replies.popleft()
            await self._wake.wait()

    async def close(self) -> None:
        self.break_off()

    def break_off(self) -> None:
        if not self.is_broken:
            self.is_broken = True
            self.node.wakes.discard(self._wake)
            self._kept.disconnected(self._stream)
            self._wake.set()

    def _take(self, reply: ToProposer) -> None:
        self._replies.append(reply)
        self._wake.set()

    def _check(self) -> None:
        if self.is_broken or not self.node.is_up:
            self.break_off()
            raise LinkBroken(f"the stream to {self.node.address} has ended")


class InProcessLinks:
    """The way of one process to all nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.cut_off: set[str] = set()  # addresses that are not reached
        self.links: list[InProcessLink] = []
        self.sent: dict[str, list[ToAcceptor]] = {}  # all messages that were sent, by address
        self.fetch_count = 0
        self.status_count = 0
        self.tails = Counter[str]()  # open tails, by address

    def cut(self, *addresses: str) -> None:
        """From now on these are not reached; without any, none is."""
        self.cut_off |= set(addresses or self.nodes.nodes)
        for link in self.links:
            if link.node.address in self.cut_off:
                link.break_off()

    def heal(self) -> None:
        self.cut_off.clear()

    def appends_to(self, address: str) -> list[Append]:
        return [each for each in self.sent.get(address, ()) if isinstance(each, Append)]

    async def connect(self, address: str, place: DatabasePlace) -> Link:
        node = await self._reach(address)
        link = InProcessLink(node, node.log(place.database_id), self.sent.setdefault(address, []))
        self.links = [each for each in self.links if not each.is_broken]
        self.links.append(link)
        return link

    async def fetch(
        self, address: str, database_id: bytes, member_id: bytes, first_lsn: int
    ) -> AsyncIterator[Sequence[Record]]:
        self.fetch_count += 1
        kept = (await self._reach(address)).log(database_id)
        if kept.state.member_id != member_id:
            raise NotAMember(f"{address} is another member")
        if first_lsn <= kept.state.log.base.lsn:
            raise RecordTrimmed(f"{address} has no record {first_lsn} any more")
        for record in kept.after(first_lsn - 1):
            await self._reach(address)
            yield [record]

    async def tail(
        self, address: str, database_id: bytes, first_wal_id: int
    ) -> AsyncIterator[TailPiece]:
        kept = (await self._reach(address)).log(database_id)
        first_lsn = kept.first_lsn_of(first_wal_id)
        sent_lsn = None if first_lsn is None else first_lsn - 1
        self.tails[address] += 1
        try:
            while True:
                if sent_lsn is None or sent_lsn < kept.state.log.base.lsn:
                    raise RecordTrimmed(f"object {first_wal_id} is only in the archive any more")
                moved = kept.moved
                committed_lsn = kept.state.committed_lsn
                records = kept.after(sent_lsn, committed_lsn)
                yield TailPiece(records, committed_lsn)
                sent_lsn += len(records)
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await moved.wait()
                await self._reach(address)
        finally:
            self.tails[address] -= 1

    async def admit(self, address: str, place: DatabasePlace, request_id: bytes) -> bytes:
        return (await self._reach(address)).admit(place, request_id)

    async def status(self, address: str, database_id: bytes = b"") -> NodeStatus:
        self.status_count += 1
        node = await self._reach(address)
        logs = [node.log(database_id)] if database_id else [*node.logs.values()]
        return NodeStatus("test", [kept.status() for kept in logs], 1 << 40)

    async def retire(self, address: str, database_id: bytes, member_id: bytes) -> None:
        node = await self._reach(address)
        if node.log(database_id).state.member_id != member_id:
            raise InvalidRequest("member_id", "it is another one")
        del node.logs[database_id]

    async def close(self) -> None:
        for link in self.links:
            link.break_off()

    async def _reach(self, address: str) -> Node:
        await asyncio.sleep(0)
        node = self.nodes[address]
        if address in self.cut_off or not node.is_up:
            raise LinkBroken(f"{address} is not reached")
        return node
