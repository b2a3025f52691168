"""Services of the writer: `shalekv.v1.KV` and `shalekv.v1.Admin` on a `WriterEngine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from shalekv.clock import Clock
from shalekv.errors import CorruptObject, InvalidRequest
from shalekv.format.coding import Piece
from shalekv.format.names import is_uuid7
from shalekv.format.sst_message import info_of
from shalekv.protocol.access import Need, Verb
from shalekv.protocol.loads import check_load_id, files_problem
from shalekv.protocol.sst_table import SstInfo
from shalekv.protocol.transaction import Change, Puts
from shalekv.runtime import Runtime
from shalekv.server import requests, transactions
from shalekv.server.access.admin import AccessAdmin
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.reads import Reads
from shalekv.server.replies.profile import profile_reply
from shalekv.server.scans import OpenViews, Scans
from shalekv.server.service import Answer, Call, MakeHeader
from shalekv.server.snapshots import SnapshotAdmin
from shalekv.server.status import ProcessReport, StoreUse, manifest_status, quorum_status
from shalekv.server.writes import Writes
from shalekv.settings import LimitSettings, WriterSettings
from shalekv.store.api import RequestCounts
from shalekv.store.reachability import Reachability
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.prices import UNKNOWN_OBJECTS
from shalekv.v1 import admin_pb2, kv_pb2, manifest_pb2
from shalekv.write.engine import WriterEngine
from shalekv.write.ingest import Loads

_LOAD_ALL = Need(Verb.INGEST)


class Ingests:
    """Implements `Admin.IngestSst`: commits SST files that are already in the object store."""

    def __init__(self, loads: Loads, header: MakeHeader) -> None:
        """Commit loads by `loads`."""
        self._loads = loads
        self._header = header

    async def ingest_sst(
        self, request: admin_pb2.IngestSstRequest, call: Call
    ) -> admin_pb2.IngestSstReply:
        """Commit the files, unless the load was committed before.

        Those of a caller who may not load all keys are read first: its request was judged by what
        it says, and their footers may be forged.

        A call that ends early, for example by its deadline, has committed the load by then, or
        does not commit it afterwards.
        """
        check_load_header(request.header)
        load_id = check_load_id(request.load_id)
        may_load_all = call.caller is None or call.caller.permissions.allow(_LOAD_ALL)
        loaded = await self._loads.ingest(
            load_id, file_infos(request.ssts), reads_blocks=not may_load_all
        )
        return admin_pb2.IngestSstReply(
            header=self._header(loaded.seq, loaded.wal_id), already_applied=loaded.already_applied
        )


def check_load_header(header: kv_pb2.RequestHeader) -> None:
    """Check the header of a load, whose id takes the place of an idempotency key."""
    requests.check_header(header)
    if header.idempotency_key:
        problem = "a load has its load_id for this: the same load is committed once"
        raise InvalidRequest("header.idempotency_key", problem)


def file_infos(messages: Sequence[manifest_pb2.SstInfo]) -> list[SstInfo]:
    """Convert the files of a load, in their order. Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("ssts", "at least one is needed")
    infos = []
    for at, message in enumerate(messages):
        try:
            info = info_of(message, Piece("the request", 0, b""))
        except (CorruptObject, ValueError) as error:
            raise InvalidRequest(f"ssts[{at}]", str(error)) from None
        if not is_uuid7(info.id):
            raise InvalidRequest(f"ssts[{at}].id", "is not a UUID of version 7, 16 bytes")
        infos.append(info)
    problem = files_problem(infos)
    if problem is not None:
        raise InvalidRequest(f"ssts[{problem[0]}]", problem[1])
    return infos


class WriterKv:
    """Implements `server.service.KvService` on a `WriterEngine`."""

    def __init__(
        self,
        engine: WriterEngine,
        views: OpenViews,
        limits: LimitSettings,
        runtime: Runtime,
        store: Reachability | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Create the service. The engine must be running for writes to be answered.

        REQUIRES: the engine was given `views.shed`, to free memory that views keep.

        `store` says what is wrong with the object store, for the errors of calls that do not end in
        time. `costs` are charged with the requests of commits.
        """
        store = store or Reachability(runtime.clock)
        costs = costs or Costs(RequestCounts(), UNKNOWN_OBJECTS)
        self._engine = engine
        self._limits = limits
        self._clock = runtime.clock
        self._database_id = engine.manifest.current.database_id
        self._epoch = engine.manifest.own.epoch
        self._writes = Writes(engine, self.header, runtime.clock, store, costs)
        self._reads = Reads(
            engine, views, limits, runtime, header=self.header, store=store, prices=costs.prices
        )

    @property
    def scans(self) -> Scans:
        """Open scans, and the views that are kept for their next pages."""
        return self._reads.scans

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[bytes]:
        """Read one key in the newest state of the read level."""
        return self._reads.get(request, call)

    def batch_get(self, request: kv_pb2.BatchGetRequest, call: Call) -> Answer[bytes]:
        """Read many keys in one state."""
        return self._reads.batch_get(request, call)

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """Set one key."""
        requests.check_write(request, call, self._clock)
        if request.HasField("precondition"):
            transaction = transactions.put_transaction(request, self._limits)
            return self._writes.transact(transaction, request, transactions.PUT_REPLY, call)
        change = requests.put_change(request, self._limits, self._engine.time.now_ms)
        return self._writes.commit([change], request, transactions.PUT_REPLY, call)

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        """Delete one key."""
        requests.check_write(request, call, self._clock)
        if request.count_deleted or request.HasField("precondition"):
            transaction = transactions.delete_transaction(request)
            return self._writes.transact(transaction, request, transactions.DELETE_REPLY, call)
        change = requests.delete_change(request)
        return self._writes.commit([change], request, transactions.DELETE_REPLY, call)

    def delete_range(
        self, request: kv_pb2.DeleteRangeRequest, call: Call
    ) -> Answer[kv_pb2.DeleteRangeReply]:
        """Delete all keys of a range."""
        requests.check_write(request, call, self._clock)
        transaction = transactions.delete_range_transaction(request)
        return self._writes.transact(transaction, request, transactions.DELETE_RANGE_REPLY, call)

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        """Apply many changes in one commit."""
        requests.check_write(request, call, self._clock)
        limits, now_ms = self._limits, self._engine.time.now_ms
        if len(request.changes) > requests.CHANGES_AT_ONCE:
            prepare = partial(self._prepare, request)
            return self._writes.commit_later(prepare, request, transactions.WRITE_REPLY, call)
        changes = requests.write_changes(request, limits, now_ms)
        if changes is None:
            transaction = transactions.write_transaction(request, limits)
            return self._writes.transact(transaction, request, transactions.WRITE_REPLY, call)
        return self._writes.commit(changes, request, transactions.WRITE_REPLY, call)

    async def _prepare(
        self, request: kv_pb2.WriteRequest
    ) -> Puts | Sequence[Change] | transactions.SizedTransaction:
        """Convert a large batch."""
        limits, now_ms = self._limits, self._engine.time.now_ms
        changes = await requests.write_changes_in_turns(request, limits, now_ms, self._clock)
        return transactions.write_transaction(request, limits) if changes is None else changes

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        """Compare, then read and change, in one commit."""
        requests.check_write(request, call, self._clock)
        transaction = transactions.txn_transaction(request, self._limits)
        return self._writes.transact(transaction, request, transactions.TXN_REPLY, call)

    def count(self, request: kv_pb2.CountRequest, call: Call) -> Answer[bytes]:
        """Count the keys of a range at one sequence number and one logical time."""
        return self._reads.count(request, call)

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[bytes]:
        """Read a range at one sequence number and one logical time."""
        return self._reads.scan(request, call)

    def header(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        """Make the header of a reply that shows the state at this commit."""
        return kv_pb2.ReplyHeader(
            database_id=self._database_id,
            role=kv_pb2.ROLE_WRITER,
            epoch=self._epoch,
            seq=seq,
            wal_id=wal_id,
        )


class WriterAdmin:
    """Implements `server.service.AdminService` on a `WriterEngine`."""

    def __init__(
        self,
        engine: WriterEngine,
        settings: WriterSettings,
        clock: Clock,
        report: ProcessReport,
        store_use: StoreUse,
        *,
        policies: AccessPolicies,
        header: MakeHeader,
        objects_replayed: int = 0,
    ) -> None:
        """Create the service; `report` completes a status, and `header` makes those of replies.

        `policies` are of the same database.

        The opening has replayed `objects_replayed` WAL objects.
        """
        self.report = report
        self.store_use = store_use
        self.snapshots = SnapshotAdmin(engine, header)
        self.access = AccessAdmin(policies, self.header)
        self._engine = engine
        self._header = header
        self._objects_replayed = objects_replayed
        self._ingests = Ingests(engine.loads, header)
        self._settings = settings
        self._clock = clock

    def status(self, request: admin_pb2.StatusRequest, call: Call) -> Answer[admin_pb2.StatusReply]:
        """Describe this process and its state."""
        del call  # answered soon, whatever the deadline
        requests.check_header(request.header)
        return self.report.complete(self._reply())

    async def collect(self, metrics: Metrics) -> None:
        """Add the metrics of this writer, and of its use of the store."""
        await self.report.collect(metrics, self._reply())
        self._engine.log.stats.add_to(metrics)
        self.store_use.collect(metrics)

    def stats(self, request: admin_pb2.StatsRequest, call: Call) -> Answer[admin_pb2.StatsReply]:
        """Count the requests that the processes of this server have sent to the object store."""
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
        """Commit SST files that are already in the object store."""
        requests.check_deadline(call, self._clock)
        self._engine.check_serving()
        return self._ingests.ingest_sst(request, call)

    def header(self) -> kv_pb2.ReplyHeader:
        """Make the header of a reply that shows all that has landed."""
        prefix = self._engine.watermark
        return self._header(prefix.landed_seq, prefix.wal_id)

    def _reply(self) -> admin_pb2.StatusReply:
        engine = self._engine
        return admin_pb2.StatusReply(
            header=self.header(),
            writer=self._writer_status(),
            memtable=admin_pb2.MemtableStatus(
                keys=engine.memtable.key_count,
                bytes=engine.memory_bytes,
                bytes_max=self._settings.memtable_bytes_max,
                runs=engine.memtable.run_count,
                range_tombstones=engine.memtable.range_tombstone_count,
                idempotency_records=len(engine.idempotency),
            ),
            manifest=manifest_status(self._engine.manifest.current),
            quorum=quorum_status(engine.safekeepers),
        )

    def _writer_status(self) -> admin_pb2.WriterStatus:
        engine = self._engine
        return admin_pb2.WriterStatus(
            durable_prefix_seq=engine.watermark.seq,
            next_wal_id=engine.log.next_wal_id,
            wal_objects_in_flight=engine.log.groups_in_flight,
            max_parallel_writes=engine.log.policy.max_parallel_writes,
            queued_bytes=engine.admission.queued_bytes,
            queued_bytes_max=self._settings.queued_bytes_max,
            wal_objects_written=engine.log.stats.objects,
            commits=engine.log.stats.commits,
            open_ms=self.report.open_ms,
            wal_objects_replayed=self._objects_replayed,
        )
