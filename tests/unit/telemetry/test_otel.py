"""`telemetry.otel` alone: which spans it makes of activities, and how they reach a collector."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shalekv.errors import StoreBroken
from shalekv.telemetry.activity import CURRENT, CallActivity, CommitActivity
from shalekv.telemetry.otel import OtelTracer
from shalekv.telemetry.otlp import TraceCollector
from shalekv.telemetry.tracing import recorded_job
from shalekv_wire.trace_context import SpanContext
from tests.servers.otlp import Collector, collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MS = 1_000_000
NOWHERE = "http://127.0.0.1:1"


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
