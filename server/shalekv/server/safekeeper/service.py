"""The service `Safekeeper`: a node, answering in messages."""

from __future__ import annotations

from collections.abc import AsyncIterator

from shalekv.format.quorum_messages import record_messages
from shalekv.roles.safekeeper.reading import fetch, tail
from shalekv.roles.safekeeper.status_messages import node_status_message
from shalekv.server.safekeeper.node import Node
from shalekv.server.safekeeper.propose import Proposing
from shalekv.server.safekeeper.relaying import Relayed
from shalekv.server.service import Call
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import DatabasePlace


class SafekeeperService:
    """Answers the calls of `shalekv.v1.Safekeeper`."""

    def __init__(self, node: Node) -> None:
        """`node` runs."""
        self._node = node
        self._settings = node.settings.safekeeper

    async def admit(self, request: wire.AdmitRequest, _call: Call) -> wire.AdmitReply:
        """Make room for a log."""
        place = DatabasePlace(request.database.database_id, request.database.url)
        return wire.AdmitReply(member_id=await self._node.admit(place, request.request_id))

    def propose(self) -> Proposing:
        """A new stream of a writer."""
        return Proposing(self._node)

    def relay(self) -> Relayed:
        """A new stream of another safekeeper."""
        return Relayed(self._node, self._node.relays)

    async def fetch(
        self, request: wire.FetchRequest, _call: Call
    ) -> AsyncIterator[wire.FetchReply]:
        """Records as they are on the disk."""
        member = self._node.find_exactly(request.database_id, request.member_id)
        async for records in fetch(member, request.first_lsn, self._settings):
            yield wire.FetchReply(records=record_messages(records))

    async def tail(self, request: wire.TailRequest, _call: Call) -> AsyncIterator[wire.TailReply]:
        """Committed records, as they become so."""
        member = self._node.find(request.database_id)
        async for piece in tail(member, request.first_wal_id, self._settings):
            records = record_messages(piece.records)
            yield wire.TailReply(records=records, committed_lsn=piece.committed_lsn)

    def status(
        self, request: wire.GetSafekeeperStatusRequest, _call: Call
    ) -> wire.GetSafekeeperStatusReply:
        """What the node holds."""
        return node_status_message(self._node.status(request.database_id))

    async def retire(self, request: wire.RetireRequest, _call: Call) -> wire.RetireReply:
        """Delete a log."""
        await self._node.retire(request.database_id, request.member_id)
        return wire.RetireReply()
