"""What a reader answers to the calls of `shalekv.v1.KV`: reads; writes are for the writer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from shalekv.replica.engine import ReaderEngine
from shalekv.runtime import Runtime
from shalekv.server.reads import Reads
from shalekv.server.scans import Scans
from shalekv.server.service import Answer, Call
from shalekv.settings import LimitSettings
from shalekv.store.reachability import Reachability
from shalekv.v1 import kv_pb2


class ReaderKv:
    """Implements `roles.service.KvService` on a `ReaderEngine`."""

    def __init__(
        self, engine: ReaderEngine, limits: LimitSettings, runtime: Runtime, store: Reachability
    ) -> None:
        """The engine must be running for the answers to grow newer.

        `store` follows the reads that are asked of the store.
        """
        self._engine = engine
        self._reads = Reads(engine, limits, runtime, header=self.header, store=store)

    @property
    def scans(self) -> Scans:
        """The scans that go on."""
        return self._reads.scans

    def header(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        """The header of a reply that shows the state at this commit."""
        return reader_header(self._engine, seq, wal_id)

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        """The value of one key, as far as this reader has followed the writer."""
        return self._reads.get(request, call)

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        """The values of many keys at one moment."""
        return self._reads.batch_get(request, call)

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range at one sequence number and one logical time."""
        return self._reads.scan(request, call)

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """Raises `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a put")

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        """Raises `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a delete")

    def delete_range(
        self, request: kv_pb2.DeleteRangeRequest, call: Call
    ) -> Answer[kv_pb2.DeleteRangeReply]:
        """Raises `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a range delete")

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        """Raises `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a write")

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        """Raises `NotTheWriter`."""
        del request, call
        raise self._engine.refusal("a transaction")


def reader_header(engine: ReaderEngine, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
    """The header of a reply of a reader."""
    return kv_pb2.ReplyHeader(
        database_id=engine.database_id,
        role=kv_pb2.ROLE_READER,
        epoch=engine.epoch,
        seq=seq,
        wal_id=wal_id,
        staleness_ms=engine.staleness_ms,
    )
