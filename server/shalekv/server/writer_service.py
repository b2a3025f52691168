"""What the writer answers to the calls of `shalekv.v1.KV`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from shalekv.roles import reply_form
from shalekv.runtime import Runtime
from shalekv.server import requests, transactions
from shalekv.server.reads import Reads
from shalekv.server.requests import check_deadline
from shalekv.server.scans import Scans
from shalekv.server.service import Answer, Call
from shalekv.server.writes import Writing
from shalekv.settings import LimitSettings
from shalekv.store.reachability import Reachability
from shalekv.v1 import kv_pb2
from shalekv.write.engine import WriterEngine


class WriterKv:
    """Implements `roles.service.KvService` on a `WriterEngine`."""

    def __init__(
        self,
        engine: WriterEngine,
        limits: LimitSettings,
        runtime: Runtime,
        store: Reachability | None = None,
    ) -> None:
        """The engine must be running for writes to be answered.

        `store` follows the reads that are asked of the store.
        """
        store = store or Reachability(runtime.clock)
        self._engine = engine
        self._limits = limits
        self._clock = runtime.clock
        self._database_id = engine.manifest.current.database_id
        self._epoch = engine.manifest.own.epoch
        self._writing = Writing(engine, self.header, runtime.clock, store)
        self._reads = Reads(engine, limits, runtime, header=self.header, store=store)

    @property
    def scans(self) -> Scans:
        """The scans that go on."""
        return self._reads.scans

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        """The value of one key, at the newest state of the read level."""
        return self._reads.get(request, call)

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        """The values of many keys at one moment."""
        return self._reads.batch_get(request, call)

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """Set one key."""
        self._check_write(request.header, call)
        if request.HasField("precondition"):
            order = transactions.put_order(request, self._limits)
            return self._writing.transact(order, request, reply_form.PUT, call)
        change = requests.put_change(request, self._limits, self._engine.time.now_ms)
        return self._writing.commit([change], request, reply_form.PUT, call)

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        """Delete one key."""
        self._check_write(request.header, call)
        if request.HasField("precondition"):
            order = transactions.delete_order(request)
            return self._writing.transact(order, request, reply_form.DELETE, call)
        change = requests.delete_change(request)
        return self._writing.commit([change], request, reply_form.DELETE, call)

    def delete_range(
        self, request: kv_pb2.DeleteRangeRequest, call: Call
    ) -> Answer[kv_pb2.DeleteRangeReply]:
        """Delete all keys of a range."""
        self._check_write(request.header, call)
        order = transactions.delete_range_order(request)
        return self._writing.transact(order, request, reply_form.DELETE_RANGE, call)

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        """Apply many changes in one commit."""
        self._check_write(request.header, call)
        changes = requests.write_changes(request, self._limits, self._engine.time.now_ms)
        if changes is None:
            order = transactions.write_order(request, self._limits)
            return self._writing.transact(order, request, reply_form.WRITE, call)
        return self._writing.commit(changes, request, reply_form.WRITE, call)

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        """Compare, then read and change, in one commit."""
        self._check_write(request.header, call)
        order = transactions.txn_order(request, self._limits)
        return self._writing.transact(order, request, reply_form.TXN, call)

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range at one sequence number and one logical time."""
        return self._reads.scan(request, call)

    def _check_write(self, header: kv_pb2.RequestHeader, call: Call) -> None:
        requests.check_write_header(header)
        check_deadline(call, self._clock)

    def header(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        """The header of a reply that shows the state at this commit."""
        return kv_pb2.ReplyHeader(
            database_id=self._database_id,
            role=kv_pb2.ROLE_WRITER,
            epoch=self._epoch,
            seq=seq,
            wal_id=wal_id,
        )
