"""What the writer tells about itself."""

from __future__ import annotations

import pytest

import shalekv
from shalekv.errors import NotImplementedYet
from shalekv.settings import WriterSettings
from shalekv.v1 import admin_pb2, kv_pb2
from tests.unit.roles.messages import key_header
from tests.unit.roles.serving import CALL, MEMORY, Serving, serving


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


async def test_status_checks_its_header() -> None:
    """What this version does not do is refused here, too."""
    async with serving() as writer:
        request = admin_pb2.StatusRequest(header=kv_pb2.RequestHeader(min_seq=1))
        with pytest.raises(NotImplementedYet):
            writer.admin.status(request, CALL)
