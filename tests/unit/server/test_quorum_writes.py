"""Writes through safekeepers as clients see them: replies, their durability, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import OutcomeUnknown, QuorumUnavailable
from shalekv.format import names
from shalekv.server.scans import OpenViews
from shalekv.server.snapshots import SnapshotAdmin
from shalekv.server.writer_service import WriterKv
from shalekv.settings import LimitSettings
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.write.engine import WriterEngine
from shalekv.write.wal import QuorumReport
from tests.kit.constants import set_constants
from tests.kit.quorum.log import QuorumDatabase, Writing, runtime, until
from tests.kit.serving.roles import CALL, Calls, absent, key_header
from tests.kit.serving.sweeping import compact
from tests.kit.virtual_time import virtual_time

NEVER_MS = 3_600_000  # so long an object stays open unless somebody asks for its end


class QuorumServing(Calls):
    """Helper for tests of such a writer."""

    kv: WriterKv

    def __init__(self, database: QuorumDatabase, writing: Writing) -> None:
        self.database = database
        self.writing = writing
        served = runtime(99)
        views = OpenViews(LimitSettings(), served.clock, served.random)
        self.kv = WriterKv(writing.engine, views, LimitSettings(), served)
        self.snapshots = SnapshotAdmin(writing.engine, self.kv.header)

    @property
    def engine(self) -> WriterEngine:
        return self.writing.engine

    @property
    def report(self) -> QuorumReport:
        return self.writing.slots.report()

    def hold(self) -> None:
        for address in ("n1:1", "n2:1"):
            self.database.nodes[address].hold()

    def release_all(self) -> None:
        for node in self.database.nodes:
            node.release_all()

    def may_archive(self, *, is_allowed: bool) -> None:
        for kept in self.database.logs():
            kept.can_archive = is_allowed


@asynccontextmanager
async def quorum_serving(**quorum: Any) -> AsyncIterator[QuorumServing]:
    """A new database with three safekeepers, and its writer; closed at the end."""
    database = await QuorumDatabase.created()
    async with database.writing(**quorum) as writing:
        serving = QuorumServing(database, writing)
        try:
            yield serving
        finally:
            serving.release_all()
            serving.may_archive(is_allowed=True)
    assert writing.ended_by is None
    assert writing.engine.admission.queued_bytes == 0
    assert len(writing.engine.log.pending_replies) == 0


DURABLE = kv_pb2.DURABILITY_DURABLE
MEMORY = kv_pb2.DURABILITY_MEMORY
QUORUM = kv_pb2.DURABILITY_QUORUM
ARCHIVED = kv_pb2.DURABILITY_ARCHIVED


@virtual_time(5)
async def test_reply_reports_its_durability() -> None:
    """The reply of a durable write reports QUORUM, that of a MEMORY write MEMORY."""
    async with quorum_serving() as writer:
        for asked, expected in (
            (kv_pb2.DURABILITY_UNSPECIFIED, QUORUM),
            (DURABLE, QUORUM),
            (QUORUM, QUORUM),
            (ARCHIVED, ARCHIVED),
        ):
            reply = await writer.put(b"a", durability=asked)
            assert (reply.durability, reply.header.HasField("wal_id")) == (expected, True)
        reply = await writer.put(b"a", durability=MEMORY)
        assert (reply.durability, reply.header.HasField("wal_id")) == (MEMORY, False)
        reply = await writer.put(b"b", precondition=absent(), durability=MEMORY)
        assert reply.durability == QUORUM


@virtual_time(5)
async def test_open_object_is_found_at_the_writer() -> None:
    """A WAL object that is not in the store yet is found at the writer of a quorum WAL."""
    async with quorum_serving(archive_interval_ms=NEVER_MS) as writer:
        reply = await writer.put(b"a")
        held = await writer.engine.unarchived_object(reply.header.wal_id)
        assert held is not None
        assert [entry.key for entry in held.entries()] == [b"a"]
    database = await QuorumDatabase.in_object_store()
    assert (await database.open()).safekeepers is None


@virtual_time(5)
async def test_archived_write_and_its_repeat_wait_for_the_object_store() -> None:
    """ARCHIVED replies come when the object is in the store; others do not wait."""
    async with quorum_serving(archive_interval_ms=NEVER_MS) as writer:
        writer.may_archive(is_allowed=False)
        request = kv_pb2.PutRequest(header=key_header(b"the key"), key=b"a", durability=ARCHIVED)
        first = asyncio.ensure_future(_awaited(writer, request))
        await until(lambda: len(writer.engine.idempotency) == 1)
        repeat = asyncio.ensure_future(_awaited(writer, request))
        await writer.put(b"b")
        assert not first.done()
        assert not repeat.done()
        writer.may_archive(is_allowed=True)
        reply = await first
        assert await repeat == reply
        assert reply.durability == ARCHIVED
        name = names.wal_name(reply.header.wal_id)
        assert (await writer.database.cas().head(name)).size_bytes > 0


@virtual_time(5)
async def test_without_a_majority_writes_end_and_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a majority writes end as unknown or are refused, reads go on, and all resumes."""
    set_constants(monkeypatch, {"shalekv.write.quorum.opening:PARALLEL_APPENDS": 2})
    async with quorum_serving() as writer:
        await writer.put(b"a", b"1")
        writer.hold()
        requests = [kv_pb2.PutRequest(key=b"k%d" % n, value=b"2") for n in range(5)]
        waiting = [asyncio.ensure_future(_awaited(writer, each)) for each in requests]
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, OutcomeUnknown) for each in ended)
        with pytest.raises(QuorumUnavailable, match="no majority"):
            await writer.put(b"b")
        with pytest.raises(QuorumUnavailable):
            await writer.put(b"b", durability=MEMORY)
        assert (await writer.get(b"a")).value == b"1"
        assert not (await writer.get(b"k0")).found
        assert writer.engine.admission.queued_bytes > 0
        writer.release_all()
        await until(lambda: writer.engine.admission.queued_bytes == 0)
        assert [(await writer.get(each.key)).value for each in requests] == [b"2"] * 5
        await writer.put(b"b")


@virtual_time(5)
async def test_key_of_an_unknown_write_is_remembered() -> None:
    """A repeat of an unknown write is unknown as well, and later gets the first reply."""
    async with quorum_serving() as writer:
        writer.hold()
        request = kv_pb2.PutRequest(header=key_header(b"the key"), key=b"a", value=b"1")
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                await writer.ask(request)
        writer.release_all()
        await until(lambda: writer.engine.admission.queued_bytes == 0)
        reply = await writer.ask(request)
        assert (reply.header.seq, reply.durability) == (1, QUORUM)
        assert writer.engine.newest_seq == 1
        assert len(writer.engine.idempotency) == 1


@virtual_time(5)
async def test_repeat_of_a_compacted_write_gets_its_reply_without_a_majority() -> None:
    """A repeat whose record is in the levels is not refused as if nothing had been applied."""
    async with quorum_serving() as writer:
        request = kv_pb2.PutRequest(header=key_header(b"the key"), key=b"a", value=b"1")
        first = await writer.ask(request)
        await writer.put(b"b", durability=ARCHIVED)
        await compact(writer.database)
        await until(lambda: not len(writer.engine.idempotency))
        writer.hold()
        await asyncio.gather(writer.put(b"b"), return_exceptions=True)  # unknown, after a while
        with pytest.raises(QuorumUnavailable):
            await writer.put(b"b")
        with pytest.raises(QuorumUnavailable):
            await writer.ask(kv_pb2.PutRequest(header=key_header(b"another"), key=b"a"))
        repeat = await writer.ask(request)
        assert (repeat.header.seq, repeat.durability) == (first.header.seq, QUORUM)


@virtual_time(5)
async def test_snapshot_holds_all_that_was_acknowledged() -> None:
    """A snapshot archives the commits in safekeepers first, since it is a view of the store."""
    async with quorum_serving(archive_interval_ms=NEVER_MS) as writer:
        reply = await writer.put(b"a")
        assert writer.report.archived_wal_id != reply.header.wal_id
        await writer.snapshots.create(admin_pb2.CreateSnapshotRequest(name="n", ttl_s=60), CALL)
        manifest = await writer.engine.manifest.refresh()
        assert manifest.wal_id_last_seen == reply.header.wal_id


async def _awaited(writer: QuorumServing, request: Message) -> kv_pb2.PutReply:
    reply: kv_pb2.PutReply = await writer.ask(request)
    return reply
