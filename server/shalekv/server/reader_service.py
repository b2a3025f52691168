"""Services of a reader: `shalekv.v1.KV` and `shalekv.v1.Admin` on a `ReplicaEngine`.

Writes and loads are refused with `NotTheWriter`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from shalekv.protocol.snapshot import find_snapshot
from shalekv.replica.engine import ReplicaEngine
from shalekv.runtime import Runtime
from shalekv.server import requests
from shalekv.server.access.admin import AccessAdmin
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.reads import Reads
from shalekv.server.replies.profile import profile_reply
from shalekv.server.scans import OpenViews, Scans
from shalekv.server.service import Answer, Call
from shalekv.server.snapshots import SnapshotAdmin
from shalekv.server.status import ProcessReport, StoreUse, manifest_status
from shalekv.settings import LimitSettings, ReaderSettings
from shalekv.store.reachability import Reachability
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.prices import UNKNOWN_OBJECTS, PriceList
from shalekv.v1 import admin_pb2, kv_pb2

_State = admin_pb2.ReaderStatus.State


class ReaderKv:
    """Implements `server.service.KvService` on a `ReplicaEngine`."""

    def __init__(
        self,
        engine: ReplicaEngine,
        views: OpenViews,
        limits: LimitSettings,
        runtime: Runtime,
        store: Reachability,
        prices: PriceList = UNKNOWN_OBJECTS,
    ) -> None:
        """Create the service. The engine must be running for the replies to show newer state.

        REQUIRES: the engine was given `views.shed`, to free memory that views keep.

        `store` says what is wrong with the object store, for the errors of reads that do not end in
        time; `prices` are those of its requests.
        """
        self._engine = engine
        self._reads = Reads(
            engine, views, limits, runtime, header=self.header, store=store, prices=prices
        )

    @property
    def scans(self) -> Scans:
        """Open scans, and the views that are kept for their next pages."""
        return self._reads.scans

    def header(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        """Make the header of a reply that shows the state at this commit."""
        return reader_header(self._engine, seq, wal_id)

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[bytes]:
        """Read one key, as far as this reader has followed the writer."""
        return self._reads.get(request, call)

    def batch_get(self, request: kv_pb2.BatchGetRequest, call: Call) -> Answer[bytes]:
        """Read many keys in one state."""
        return self._reads.batch_get(request, call)

    def count(self, request: kv_pb2.CountRequest, call: Call) -> Answer[bytes]:
        """Count the keys of a range at one sequence number and one logical time."""
        return self._reads.count(request, call)

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[bytes]:
        """Read a range at one sequence number and one logical time."""
        return self._reads.scan(request, call)

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """Raise `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a put")

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        """Raise `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a delete")

    def delete_range(
        self, request: kv_pb2.DeleteRangeRequest, call: Call
    ) -> Answer[kv_pb2.DeleteRangeReply]:
        """Raise `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a range delete")

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        """Raise `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a write")

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        """Raise `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a transaction")


def reader_header(engine: ReplicaEngine, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
    """Make the header of a reply of a reader."""
    return kv_pb2.ReplyHeader(
        database_id=engine.database_id,
        role=kv_pb2.ROLE_READER,
        epoch=engine.epoch,
        seq=seq,
        wal_id=wal_id,
        staleness_ms=engine.staleness_ms,
    )


class ReaderAdmin:
    """Implements `server.service.AdminService` on a `ReplicaEngine`."""

    def __init__(
        self,
        engine: ReplicaEngine,
        settings: ReaderSettings,
        report: ProcessReport,
        store_use: StoreUse,
        policies: AccessPolicies,
    ) -> None:
        """Create the service; `report` completes a status, `policies` are of the same database."""
        self.report = report
        self.store_use = store_use
        self.snapshots = SnapshotAdmin(engine, partial(reader_header, engine))
        self.access = AccessAdmin(policies, self.header)
        self._engine = engine
        self._settings = settings

    def status(self, request: admin_pb2.StatusRequest, call: Call) -> Answer[admin_pb2.StatusReply]:
        """Describe this process and its state."""
        del call  # answered soon, whatever the deadline
        requests.check_header(request.header)
        return self.report.complete(self._reply())

    async def collect(self, metrics: Metrics) -> None:
        """Add the metrics of this reader, and of its use of the store."""
        await self.report.collect(metrics, self._reply())
        self.store_use.collect(metrics)

    def stats(self, request: admin_pb2.StatsRequest, call: Call) -> Answer[admin_pb2.StatsReply]:
        """Count the requests that this process has sent to the object store."""
        del call  # as above
        requests.check_header(request.header)
        return self.store_use.reply(self.header())

    def list_slow_calls(
        self, request: admin_pb2.ListSlowCallsRequest, call: Call
    ) -> Answer[admin_pb2.ListSlowCallsReply]:
        """List none: `rpc` has them."""
        del call  # as above
        requests.check_header(request.header)
        return admin_pb2.ListSlowCallsReply(header=self.header())

    def profile(
        self, request: admin_pb2.ProfileRequest, call: Call
    ) -> Answer[admin_pb2.ProfileReply]:
        """Sample where this process spends its time."""
        del call  # cancelled when its client has gone
        requests.check_header(request.header)
        return profile_reply(request, self.header)

    def ingest_sst(
        self, request: admin_pb2.IngestSstRequest, call: Call
    ) -> Answer[admin_pb2.IngestSstReply]:
        """Raise `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a load")

    def header(self) -> kv_pb2.ReplyHeader:
        """Make the header of a reply that shows all that this reader shows."""
        return reader_header(
            self._engine, self._engine.watermark.seq, self._engine.watermark.wal_id
        )

    def _reply(self) -> admin_pb2.StatusReply:
        engine = self._engine
        return admin_pb2.StatusReply(
            header=self.header(),
            reader=self._reader_status(),
            memtable=admin_pb2.MemtableStatus(
                keys=engine.memtable.key_count,
                bytes=engine.memory_bytes,
                bytes_max=self._settings.reader_memtable_bytes_max,
                runs=engine.memtable.run_count,
                range_tombstones=engine.memtable.range_tombstone_count,
            ),
            manifest=manifest_status(engine.manifest.current),
        )

    def _reader_status(self) -> admin_pb2.ReaderStatus:
        engine, follower = self._engine, self._engine.follower
        tail = follower.tail
        own = find_snapshot(engine.manifest.current, engine.pinned.snapshot_id)
        return admin_pb2.ReaderStatus(
            state=self._state(),
            next_wal_id=follower.next_wal_id,
            snapshot_id=b"" if own is None else own.id,
            snapshot_expire_time_s=0 if own is None else own.snapshot_expire_time_s,
            snapshots_lost=engine.levels.lost_count,
            wal_objects_applied=follower.counts.applied,
            empty_polls=follower.counts.empty_polls,
            poll_interval_ms=int(follower.polls.interval_ms),
            gaps=follower.gaps.count,
            gap_ms=int(follower.gaps.total_ms),
            writer_address=engine.writer_address,
            open_ms=self.report.open_ms,
            tail_address=tail.address if tail is not None and tail.is_live else "",
            tails=0 if tail is None else tail.tail_count,
        )

    def _state(self) -> admin_pb2.ReaderStatus.State.ValueType:
        follower = self._engine.follower
        if follower.is_cut_off or self.report.readiness().reads is not None:
            return _State.STATE_CUT_OFF
        if self._engine.applier.memory.is_full:
            return _State.STATE_FULL
        return _State.STATE_GAP if follower.gaps.is_open else _State.STATE_FOLLOWING
