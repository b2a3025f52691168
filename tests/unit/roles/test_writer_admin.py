"""What the writer tells about itself."""

from __future__ import annotations

import pytest

import shalekv
import shalekv_client
from shalekv.clock import LoopClock
from shalekv.core.prices import OBJECT_KINDS, RECORD_KINDS
from shalekv.errors import InvalidRequest
from shalekv.roles.store_use import ProcessUse, StorePlace
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.requests import RequestKind
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.serving.messages import key_header
from tests.kit.serving.roles import CALL, MEMORY, Serving, serving


def status(writer: Serving) -> admin_pb2.StatusReply:
    """The status now."""
    answer = writer.admin.status(admin_pb2.StatusRequest(), CALL)
    assert isinstance(answer, admin_pb2.StatusReply)
    return answer


async def test_status_tells_what_was_written() -> None:
    """Counters, sizes and the header follow what has landed and what has not."""
    async with serving(max_parallel_writes=2) as writer:
        await writer.put(b"a")
        await writer.put(b"a")
        writer.store.is_holding = True
        await writer.put(b"b", durability=MEMORY)
        await writer.store.arrived(1)
        reply = status(writer)
        assert reply.version == shalekv.__version__
        assert (reply.url, reply.writer.open_ms) == ("memory://held", 12)
        assert reply.header.role == kv_pb2.ROLE_WRITER
        assert (reply.header.epoch, reply.header.seq, reply.header.wal_id) == (1, 2, 3)
        found = reply.writer
        assert (found.durable_prefix_seq, found.next_wal_id) == (2, 5)
        assert (found.wal_objects_in_flight, found.max_parallel_writes) == (1, 2)
        assert (found.wal_objects_written, found.commits) == (2, 2)
        assert found.wal_objects_replayed == 0
        assert 0 < found.queued_bytes < found.queued_bytes_max
        assert (reply.memtable.keys, reply.memtable.runs) == (1, 2)
        assert reply.memtable.bytes > 0
        assert reply.memtable.bytes_max == WriterSettings().memtable_bytes_max
        assert (reply.manifest.manifest_id, reply.manifest.snapshots) == (2, 1)


async def test_status_tells_what_is_remembered() -> None:
    """Range deletes and idempotency keys are told, and take memory that is counted."""
    async with serving() as writer:
        before = status(writer).memtable
        assert (before.range_tombstones, before.idempotency_records, before.bytes) == (0, 0, 0)
        for number in range(2):
            await writer.delete(b"a", header=key_header(b"%d" % number))
        with_records = status(writer).memtable
        assert (with_records.idempotency_records, with_records.keys) == (2, 1)
        await writer.ask(kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"b")))
        with_range = status(writer).memtable
        assert with_range.range_tombstones == 1
        assert 0 < with_records.bytes < with_range.bytes


async def test_stats_tell_what_was_sent() -> None:
    """Whoever is asked is told of with its requests by kind, beside the view of the writer."""
    async with serving() as writer:
        commit = await writer.put(b"a")
        clock = LoopClock()
        sent = {RequestKind.WRITE: 3, RequestKind.RECORD_READ: 2, RequestKind.LIST: 0}
        began_ms = clock.monotonic_ms() - 5_000
        writer.admin.store_use.measure(lambda: [ProcessUse("writer", began_ms, sent)])
        writer.admin.store_use.measure(lambda: [ProcessUse("compactor", began_ms + 9_999, {})])
        reply = writer.admin.stats(admin_pb2.StatsRequest(), CALL)
        assert isinstance(reply, admin_pb2.StatsReply)
        assert (reply.header.role, reply.header.seq) == (kv_pb2.ROLE_WRITER, commit.header.seq)
        assert (reply.url, reply.endpoint, reply.records) == ("memory://held", "", "")
        own, compactor = reply.processes
        assert (own.role, compactor.role, compactor.uptime_ms) == ("writer", "compactor", 0)
        assert own.uptime_ms >= 5_000
        assert {each.kind: each.requests for each in own.requests} == {
            admin_pb2.REQUEST_KIND_WRITE: 3,
            admin_pb2.REQUEST_KIND_RECORD_READ: 2,
        }


def test_every_kind_can_be_told() -> None:
    """By the wire, by the client and by the prices there are the same kinds."""
    kinds = [kind.name for kind in RequestKind]
    assert [f"REQUEST_KIND_{name}" for name in kinds] == list(admin_pb2.RequestKind.keys())[1:]
    assert {kind.name: kind.value for kind in shalekv_client.RequestKind} == {
        name.removeprefix("REQUEST_KIND_"): number
        for name, number in list(admin_pb2.RequestKind.items())[1:]
    }
    assert [*OBJECT_KINDS, *RECORD_KINDS] == [kind.value for kind in RequestKind]
    assert [name.lower() for name in kinds] == [kind.value for kind in RequestKind]


def test_no_secret_is_told() -> None:
    """Of an endpoint the host alone, of the URL of records the scheme alone."""
    settings = StoreSettings(
        endpoint_url="https://me:pass-word@there:9000/path",
        records_url="mysql://me:pass[word@there/database",
    )
    place = StorePlace.of("s3://bucket", settings)
    assert place == StorePlace("s3://bucket", endpoint="there:9000", records="mysql")
    assert StorePlace.of("s3://bucket", StoreSettings()) == StorePlace("s3://bucket")


async def test_status_checks_its_header() -> None:
    """What no call takes is refused here, too."""
    async with serving() as writer:
        request = admin_pb2.StatusRequest(header=kv_pb2.RequestHeader(snapshot_id=b"1"))
        with pytest.raises(InvalidRequest, match=r"header\.snapshot_id: 1 bytes"):
            writer.admin.status(request, CALL)
