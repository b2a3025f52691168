"""Snapshot calls of `shalekv.v1.Admin`, of the writer and of readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from shalekv.errors import InvalidRequest, OutcomeUnknown, StoreUnavailable
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.snapshot import is_expired
from shalekv.read.engine import ReadEngine
from shalekv.server import requests
from shalekv.server.service import Call, MakeHeader
from shalekv.store.active_manifests import retry_if_manifest_changed
from shalekv.store.manifests import StoredManifest
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.write.snapshots import (
    GAP_WAIT_MS,
    ID_BYTES,
    Snapshots,
    SnapshotSeqs,
    check_snapshot_name,
)

ActiveSnapshots: TypeAlias = tuple[Sequence[Snapshot], Mapping[bytes, int]]  # id -> seq
RequestWithTtl: TypeAlias = admin_pb2.CreateSnapshotRequest | admin_pb2.RenewSnapshotRequest
RequestWithName: TypeAlias = admin_pb2.RenewSnapshotRequest | admin_pb2.DeleteSnapshotRequest


@contextmanager
def _unknown_during_outage() -> Iterator[None]:
    """Raise `OutcomeUnknown` when the store does not answer: the edit may have been made."""
    try:
        yield
    except StoreUnavailable as error:
        raise OutcomeUnknown(str(error)) from error


class SnapshotAdmin:
    """Creates, renews, lists and deletes the snapshots of a database, by edits of its manifest."""

    def __init__(self, engine: ReadEngine, header: MakeHeader) -> None:
        """Edit the manifest of the database that `engine` serves."""
        self._engine = engine
        self._header = header
        self._views = engine.snapshots
        self._store = store = self._views.store
        self._limits = self._views.limits
        self._snapshots = Snapshots(store)
        self._seqs = SnapshotSeqs(store)

    async def create(
        self, request: admin_pb2.CreateSnapshotRequest, call: Call
    ) -> admin_pb2.CreateSnapshotReply:
        """Pin the current state, with every write that was acknowledged before the call."""
        self._check(request.header, call)
        check_snapshot_name(request.name)
        ttl_ms = self._ttl_ms(request)
        engine = self._engine
        await engine.watermark.wait_for(engine.watermark.landed_seq)
        await engine.archive()  # a snapshot shows what is in the object store
        with _unknown_during_outage():
            created = await self._snapshots.create(
                name=request.name,
                ttl_ms=ttl_ms,
                count_max=self._limits.snapshot_count_max,
                logical_ms=engine.now_ms(),
                gap_wait_ms=GAP_WAIT_MS,
            )
            info = await self._info(created)
        return admin_pb2.CreateSnapshotReply(header=self._reply_header(), snapshot=info)

    async def renew(
        self, request: admin_pb2.RenewSnapshotRequest, call: Call
    ) -> admin_pb2.RenewSnapshotReply:
        """Extend the life of a snapshot."""
        self._check(request.header, call)
        ttl_ms = self._ttl_ms(request)
        with _unknown_during_outage():
            renewed = await self._snapshots.renew(_name_or_id(request), ttl_ms=ttl_ms)
            info = await self._info(renewed)
        return admin_pb2.RenewSnapshotReply(header=self._reply_header(), snapshot=info)

    async def list(
        self, request: admin_pb2.ListSnapshotsRequest, call: Call
    ) -> admin_pb2.ListSnapshotsReply:
        """List the snapshots that have not expired, in the order of their creation."""
        self._check(request.header, call)
        active, seqs = await retry_if_manifest_changed(self._store, partial(self._active, None))
        infos = [snapshot_info(each, seqs[each.id]) for each in active]
        return admin_pb2.ListSnapshotsReply(header=self._reply_header(), snapshots=infos)

    async def delete(
        self, request: admin_pb2.DeleteSnapshotRequest, call: Call
    ) -> admin_pb2.DeleteSnapshotReply:
        """Delete a snapshot; in this process, reads of it fail from the next one on."""
        self._check(request.header, call)
        with _unknown_during_outage():
            await self._snapshots.delete(_name_or_id(request))
        self._views.live.forget_poll()
        return admin_pb2.DeleteSnapshotReply(header=self._reply_header())

    def _check(self, header: kv_pb2.RequestHeader, call: Call) -> None:
        """Check the header, and that this process serves. No call here has an idempotency key."""
        requests.check_header(header)
        if header.snapshot_id:
            raise InvalidRequest("header.snapshot_id", "this call reads no state")
        if header.idempotency_key:
            problem = "a snapshot has a name for this, which no second one can have"
            raise InvalidRequest("header.idempotency_key", problem)
        requests.check_deadline(call, self._store.runtime.clock)
        self._engine.check_serving()

    def _reply_header(self) -> kv_pb2.ReplyHeader:
        prefix = self._engine.watermark
        return self._header(prefix.seq, prefix.wal_id)

    async def _info(self, snapshot: Snapshot) -> admin_pb2.SnapshotInfo:
        """Describe a snapshot; its sequence number is 0, unknown, if it has expired by now."""
        _, seqs = await retry_if_manifest_changed(self._store, partial(self._active, snapshot.id))
        return snapshot_info(snapshot, seqs.get(snapshot.id, 0))

    async def _active(self, snapshot_id: bytes | None, stored: StoredManifest) -> ActiveSnapshots:
        """Find the snapshots that have not expired, and their sequence numbers.

        `snapshot_id` limits them to one; None: all.
        """
        now_s = await self._store.now_ms() / 1_000
        current: Manifest = await stored.refresh()
        active = [
            each
            for each in current.snapshots
            if not is_expired(each, now_s) and snapshot_id in (None, each.id)
        ]
        return active, await self._seqs.of(current, active)

    def _ttl_ms(self, request: RequestWithTtl) -> int | None:
        if request.forever:
            if request.ttl_s:
                raise InvalidRequest("forever", "excludes ttl_s")
            return None
        if not request.ttl_s:
            raise InvalidRequest("ttl_s", "is needed, or forever")
        if request.ttl_s > self._limits.snapshot_ttl_s_max:
            problem = (
                f"{request.ttl_s}, and snapshot_ttl_s_max is {self._limits.snapshot_ttl_s_max}"
            )
            raise InvalidRequest("ttl_s", problem)
        return request.ttl_s * 1_000


def snapshot_info(snapshot: Snapshot, seq: int) -> admin_pb2.SnapshotInfo:
    """Convert a snapshot to its message."""
    return admin_pb2.SnapshotInfo(
        id=snapshot.id,
        name=snapshot.name,
        manifest_id=snapshot.manifest_id,
        expire_time_s=snapshot.snapshot_expire_time_s,
        seq=seq,
    )


def _name_or_id(request: RequestWithName) -> str:
    """Return the name of the snapshot, or its id in hexadecimal, as `Snapshots` takes them."""
    if request.name:
        if request.id:
            raise InvalidRequest("name", "excludes id")
        check_snapshot_name(request.name)
        return request.name
    if not request.id:
        raise InvalidRequest("id", "is needed, or name")
    if len(request.id) != ID_BYTES:
        problem = f"{len(request.id)} bytes, and the id of a snapshot has {ID_BYTES}"
        raise InvalidRequest("id", problem)
    return request.id.hex()
