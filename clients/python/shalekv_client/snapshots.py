"""Snapshots: states of the database that are kept, and can be read, until they expire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from shalekv.v1 import admin_pb2
from shalekv_client.operations import ADMIN, Method
from shalekv_client.policies import Destination
from shalekv_client.routing.fleet import Fleet

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)

ID_BYTES = 16
_CREATE = Method(
    f"/{ADMIN}/CreateSnapshot", admin_pb2.CreateSnapshotRequest, admin_pb2.CreateSnapshotReply
)
_RENEW = Method(
    f"/{ADMIN}/RenewSnapshot", admin_pb2.RenewSnapshotRequest, admin_pb2.RenewSnapshotReply
)
_LIST = Method(
    f"/{ADMIN}/ListSnapshots", admin_pb2.ListSnapshotsRequest, admin_pb2.ListSnapshotsReply
)
_DELETE = Method(
    f"/{ADMIN}/DeleteSnapshot", admin_pb2.DeleteSnapshotRequest, admin_pb2.DeleteSnapshotReply
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the database that is kept. Any server of the database can read it."""

    id: bytes  # 16 bytes: the argument `at` of reads
    name: str  # empty: none
    manifest_id: int  # the manifest that it pins
    expire_time_s: int  # seconds since the Unix epoch, by the clock of the store; 0: never
    seq: int  # the last commit that it includes


class SnapshotCalls:
    """The calls of a client about snapshots. Any server answers them; see `Client`.

    The argument `called` of `renew_snapshot` and `delete_snapshot` is the id (bytes) or the name
    (str) of the snapshot. They raise `SnapshotNotFound` when there is none.
    """

    fleet: Fleet
    _timeout_ms: int

    async def create_snapshot(
        self,
        name: str = "",
        *,
        ttl_s: int = 0,
        forever: bool = False,
        timeout_ms: int | None = None,
    ) -> Snapshot:
        """Keep the present state, which includes everything that was acknowledged before.

        The snapshot expires after `ttl_s` seconds, or is kept `forever`: give one of the two.
        Raises `SnapshotExists` when another snapshot has the name.
        """
        request = admin_pb2.CreateSnapshotRequest(name=name, ttl_s=ttl_s, forever=forever)
        # A repeat would create a second snapshot, or find the name in use by the first.
        reply = await self._ask(_CREATE, request, timeout_ms, is_repeatable=False)
        return snapshot_of(reply.snapshot)

    async def renew_snapshot(
        self,
        called: bytes | str,
        *,
        ttl_s: int = 0,
        forever: bool = False,
        timeout_ms: int | None = None,
    ) -> Snapshot:
        """Let an unexpired snapshot expire `ttl_s` seconds from now, or keep it `forever`."""
        request = admin_pb2.RenewSnapshotRequest(ttl_s=ttl_s, forever=forever)
        _name(request, called)
        reply = await self._ask(_RENEW, request, timeout_ms, is_repeatable=True)
        return snapshot_of(reply.snapshot)

    async def list_snapshots(self, *, timeout_ms: int | None = None) -> list[Snapshot]:
        """Return the snapshots that have not expired, oldest first."""
        request = admin_pb2.ListSnapshotsRequest()
        reply = await self._ask(_LIST, request, timeout_ms, is_repeatable=True)
        return [snapshot_of(each) for each in reply.snapshots]

    async def delete_snapshot(self, called: bytes | str, *, timeout_ms: int | None = None) -> None:
        """Delete a snapshot. The next collection deletes the objects that only it has kept."""
        request = admin_pb2.DeleteSnapshotRequest()
        _name(request, called)
        # A repeat would report that there is none when the first attempt has deleted it.
        await self._ask(_DELETE, request, timeout_ms, is_repeatable=False)

    async def _ask(
        self,
        method: Method[RequestT, ReplyT],
        request: RequestT,
        timeout_ms: int | None,
        *,
        is_repeatable: bool,
    ) -> ReplyT:
        return await self.fleet.unary(
            method,
            request,
            destination=Destination.BY_POLICY,
            is_repeatable=is_repeatable,
            timeout_ms=self._timeout_ms if timeout_ms is None else timeout_ms,
        )


def snapshot_of(info: admin_pb2.SnapshotInfo) -> Snapshot:
    """Decode the snapshot of a reply."""
    return Snapshot(info.id, info.name, info.manifest_id, info.expire_time_s, info.seq)


def _name(
    request: admin_pb2.RenewSnapshotRequest | admin_pb2.DeleteSnapshotRequest, called: bytes | str
) -> None:
    if isinstance(called, bytes):
        request.id = called
    else:
        request.name = called
