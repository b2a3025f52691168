"""`telemetry.otel` alone: which spans it makes of activities, and how they reach a collector."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import ref

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from shalekv.errors import StoreBroken
from shalekv.telemetry import otlp
from shalekv.telemetry.activity import CURRENT, CallActivity, CommitActivity
from shalekv.telemetry.otel import OtelTracer
from shalekv.telemetry.otlp import TraceCollector
from shalekv.telemetry.tracing import recorded_job
from shalekv_wire.trace_context import SpanContext
from tests.servers.otlp import Collector, collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MS = 1_000_000
NOWHERE = "http://127.0.0.1:1"
SERVER = Span.SPAN_KIND_SERVER


def tracer_to(url: str, ratio: float = 1.0) -> OtelTracer:
    return OtelTracer(
        TraceCollector(url), ratio=ratio, role="writer", database_url="file:///database"
    )


@asynccontextmanager
async def collected_from() -> AsyncIterator[tuple[OtelTracer, Collector]]:
    """A tracer whose spans have all arrived when this is left."""
    async with collector() as collected:
        tracer = tracer_to(collected.url)
        yield tracer, collected
        await asyncio.to_thread(tracer.close)


def now_ns() -> int:
    return time.perf_counter_ns()


def begun_call(tracer: OtelTracer, parent: SpanContext | None = None) -> CallActivity:
    activity = CallActivity(now_ns() - 10 * MS, parent)
    tracer.begin_call("KV.Put", activity)
    return activity


def stored_group(began_ns: int, wal_id: int = 7) -> CommitActivity:
    group = CommitActivity(began_ns, wal_id=wal_id, commit_count=3, size_bytes=500)
    group.queued_ns = began_ns - MS
    group.encoded_ns = began_ns + MS
    request = group.begin_request("create", "wal/0007", group.encoded_ns)
    request.attempts, request.size_bytes, request.problem = 2, 480, "no answer"
    request.ended_ns = group.stored_ns = began_ns + 5 * MS
    group.visible_ns = began_ns + 6 * MS
    return group


def do_job(tracer: OtelTracer) -> None:
    with recorded_job(tracer, "collection") as attributes:
        attributes["shalekv.collection.deleted_objects"] = 9
        job = CURRENT.get()
        assert job is not None
        job.sent.add({"delete": 4})
        job.begin_request("delete", "wal/0001", now_ns()).ended_ns = now_ns()
        raise StoreBroken("file:///database", "delete", "wal/0001", "")


@pytest.mark.parametrize(
    ("ratio", "least", "most"), [(0, 0, 0), (0.2, 9_500, 10_500), (1, 50_000, 50_000)]
)
def test_calls_are_recorded_by_the_ratio(ratio: float, least: int, most: int) -> None:
    """Of calls whose callers do not decide it, this share is recorded, each by chance."""
    tracer = tracer_to(NOWHERE, ratio)
    tracer.close()
    assert least <= sum(tracer.by_chance() for _ in range(50_000)) <= most


async def test_a_call_and_its_commit_link_to_each_other() -> None:
    """The calls of a group have one span of the group to link to, in a trace of its own, which
    links back to them, and has the stages and the store requests.
    """
    async with collected_from() as (tracer, collected):
        parent = SpanContext(TRACE, SPAN, is_sampled=True)
        first, second = begun_call(tracer, parent), begun_call(tracer)
        first.waited_ns["admission"] = 2 * MS
        first.commit = second.commit = group = stored_group(first.began_ns + 2 * MS)
        tracer.end_call(first, "OK", now_ns())
        tracer.end_call(second, "OK", now_ns())
        tracer.end_commit(group)
    (commit,) = collected.named("commit")
    calls = {call.trace_id == TRACE: call for call in collected.named("KV.Put")}
    assert calls[True].parent_id == SPAN
    assert calls[False].parent_id == ""
    for call in calls.values():
        assert call.kind == "SERVER"
        assert call.links == {commit.span_id}
        assert call.attributes == {
            "rpc.system.name": "grpc",
            "rpc.method": "shalekv.v1.KV/Put",
            "rpc.response.status_code": "OK",
            "shalekv.commit.wal_id": 7,
        }
    assert (commit.trace_id, commit.parent_id) not in {
        (call.trace_id, "") for call in calls.values()
    }
    assert commit.links == {call.span_id for call in calls.values()}
    assert commit.events == ("taken", "encoded", "stored", "visible")
    assert commit.duration_ms == pytest.approx(7.0)
    assert commit.attributes == {
        "shalekv.commit.wal_id": 7,
        "shalekv.commit.commits": 3,
        "shalekv.commit.bytes": 500,
        "shalekv.commit.attempts": 2,
    }
    (request,) = collected.children(commit)
    assert (request.name, request.kind, request.is_failed) == ("create wal", "CLIENT", False)
    assert request.duration_ms == pytest.approx(4.0)
    assert request.attributes == {
        "shalekv.store.object": "wal/0007",
        "shalekv.store.attempts": 2,
        "shalekv.store.bytes": 480,
        "shalekv.store.problem": "no answer",
    }
    (admission,) = collected.children(calls[True])
    assert admission.name == "admission"
    assert admission.duration_ms == pytest.approx(2.0)


async def test_spans_are_what_otlp_says() -> None:
    """Ids have their lengths, flags say that a span is recorded and where its parent is, links name
    spans that were sent, and events are within their span, on the clock of the machine.
    """
    async with collected_from() as (tracer, collected):
        for parent in (SpanContext(TRACE, SPAN, is_sampled=True), None):
            call = begun_call(tracer, parent)
            call.commit = stored_group(call.began_ns + MS)
            tracer.end_call(call, "OK", now_ns())
            tracer.end_commit(call.commit)
    calls = {span.trace_id: span.span_id for span in collected.messages if span.kind == SERVER}
    commits = {span.trace_id: span.span_id for span in collected.messages if span.name == "commit"}
    assert len(calls) == len(commits) == 2
    for span in collected.messages:
        is_remote = span.trace_id.hex() == TRACE and span.kind == SERVER
        assert span.flags == (0x301 if is_remote else 0x101)
        named: list[Span | Span.Link] = [span, *span.links]
        assert {(len(each.trace_id), len(each.span_id)) for each in named} == {(16, 8)}
        assert len(span.parent_span_id) == (8 if is_remote or span.name == "create wal" else 0)
        linked = [(link.trace_id, link.span_id, link.flags) for link in span.links]
        for others, is_one in ((commits, span.kind == SERVER), (calls, span.name == "commit")):
            assert not is_one or linked[0] in {(*each, 0x101) for each in others.items()}
        events_ns = [event.time_unix_nano for event in span.events]
        times_ns = [span.start_time_unix_nano, *events_ns, span.end_time_unix_nano]
        assert times_ns == sorted(times_ns)


@pytest.mark.parametrize("queue_max", [0, otlp.QUEUE_MAX], ids=["dropped", "sent"])
async def test_spans_hold_nothing_afterwards(
    monkeypatch: pytest.MonkeyPatch, queue_max: int
) -> None:
    """Their activities go at once, without a search for garbage, which is rare under load."""
    monkeypatch.setattr(otlp, "QUEUE_MAX", queue_max)
    gc.disable()
    try:
        async with collected_from() as (tracer, collected):
            call, group = begun_call(tracer), stored_group(now_ns())
            call.commit = group
            tracer.end_call(call, "OK", now_ns())
            tracer.end_commit(group)
            held = [ref(call.sent), ref(group.sent)]
            del call, group
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
    assert tracer.dropped + len(collected.spans) == 3


async def test_what_goes_on_is_not_part_of_a_span() -> None:
    """A call or a job ends while a load that it has begun goes on for others."""
    async with collected_from() as (tracer, collected):
        call, job = begun_call(tracer), tracer.begin_job("compaction")
        tracer.end_call(call, "CANCELLED", now_ns())
        tracer.end_job(job, {})
        for activity in (call, job):
            activity.begin_request("get", "levels/some.sst", now_ns())
            activity.sent.add({"read": 1})
    assert {span.name for span in collected.spans} == {"KV.Put", "compaction"}
    assert collected.named("compaction")[0].attributes == {}


async def test_a_group_without_recorded_calls_has_no_span() -> None:
    """A group is recorded only with one of its calls, also one that is answered afterwards."""
    async with collected_from() as (tracer, collected):
        tracer.end_commit(stored_group(now_ns(), wal_id=1))
        group = stored_group(now_ns(), wal_id=2)
        tracer.end_commit(group)
        late, later = begun_call(tracer), begun_call(tracer)
        late.commit = later.commit = group
        tracer.end_call(late, "OK", now_ns())
        tracer.end_call(later, "OK", now_ns())
    (commit,) = collected.named("commit")
    assert commit.attributes["shalekv.commit.wal_id"] == 2
    assert {call.links for call in collected.named("KV.Put")} == {frozenset({commit.span_id})}
    assert len(commit.links) == 1


async def test_a_read_tells_what_it_has_searched() -> None:
    """A read has its SSTs and blocks as attributes, and its store requests as children."""
    async with collected_from() as (tracer, collected):
        read = CallActivity(now_ns())
        tracer.begin_call("Session.get", read)
        read.ssts_searched, read.blocks_cached, read.blocks_fetched = 3, 2, 1
        request = read.begin_request("get_range", "levels/some.sst", now_ns())
        tracer.end_call(read, "UNAVAILABLE", now_ns())  # before the request has ended
    (span,) = collected.named("Session.get")
    assert span.trace_id == read.trace_id
    assert span.is_failed
    assert span.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "shalekv.v1.KV/Session",
        "rpc.response.status_code": "UNAVAILABLE",
        "error.type": "UNAVAILABLE",
        "shalekv.read.ssts_searched": 3,
        "shalekv.read.blocks_cached": 2,
        "shalekv.read.blocks_fetched": 1,
    }
    (child,) = collected.children(span)
    assert child.name == "get_range levels"
    assert child.attributes["shalekv.store.unfinished"] == 1
    assert request.ended_ns == 0


async def test_spans_have_the_time_of_the_machine_and_their_origin() -> None:
    """Times are those of the clock of the machine; the resource says which process it was."""
    before_ns = time.time_ns()
    async with collected_from() as (tracer, collected):
        with pytest.raises(StoreBroken):
            do_job(tracer)
        with recorded_job(None, "collection") as attributes:
            attributes["ignored"] = 1
    span, request = collected.spans
    assert CURRENT.get() is None
    assert (request.name, request.parent_id) == ("delete wal", span.span_id)
    assert before_ns - MS < span.began_ns < time.time_ns()
    assert (span.name, span.is_failed) == ("collection", True)
    assert span.attributes == {
        "shalekv.collection.deleted_objects": 9,
        "shalekv.store.sent.delete": 4,
    }
    assert span.resource["service.name"] == "shalekv"
    assert span.resource["shalekv.role"] == "writer"
    assert span.resource["shalekv.database.url"] == "file:///database"
    assert span.resource["service.instance.id"]
