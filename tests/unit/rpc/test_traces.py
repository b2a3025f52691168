"""Traces of a real server with a real store, as a collector gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from shalekv.cli.process.traces import open_tracer
from shalekv.jobs.compact.parts import OwnProcessParts
from shalekv.server.compactor import CompactionTarget, Compactors
from shalekv.settings.telemetry import TelemetrySettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryObjects
from shalekv.telemetry.tracing import Tracer, recorded_job
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import Client, Get, Missing, Put, ShaleKVError
from shalekv_wire.client import WireChannel
from shalekv_wire.trace_context import TRACE_ID, SpanContext
from tests.kit.engine.compaction import small_settings
from tests.kit.processes.in_process import memory_store, real_runtime, serving
from tests.servers.otlp import Collector, collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = SpanContext(TRACE, SPAN, is_sampled=True).traceparent()
UNSAMPLED = SpanContext(TRACE, SPAN, is_sampled=False).traceparent()


@dataclass(frozen=True, slots=True)
class Traced:
    """A server, and where its spans go."""

    listen: str
    collected: Collector
    tracer: Tracer

    async def ask(self, path: str, request: bytes, traceparent: str) -> None:
        channel = WireChannel(self.listen)
        metadata = (("traceparent", traceparent),) if traceparent else ()
        try:
            await channel.unary(path, request, timeout_s=30, metadata=metadata)
        finally:
            await channel.close()

    async def put(self, key: bytes, traceparent: str = SAMPLED) -> None:
        request = kv_pb2.PutRequest(key=key, value=b"v").SerializeToString()
        await self.ask("/shalekv.v1.KV/Put", request, traceparent)


@asynccontextmanager
async def traced(
    ratio: float = 0.0, store: ObjectStore | None = None
) -> AsyncIterator[tuple[Traced, Collector]]:
    """Serve a database; its spans have arrived when this is left."""
    async with collector() as collected:
        settings = TelemetrySettings(otlp_endpoint=collected.url, trace_ratio=ratio)
        async with (
            open_tracer(settings, "writer", "memory://test") as tracer,
            serving(store or memory_store(), None, tracer) as served,
        ):
            assert tracer is not None
            yield Traced(served.listen, collected, tracer), collected


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """A program that records spans, which go nowhere."""
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider


@pytest.mark.parametrize(
    ("traceparent", "ratio", "is_recorded"),
    [(SAMPLED, 0, True), (UNSAMPLED, 1, False), ("", 0, False), ("", 1, True), ("mist", 1, True)],
)
async def test_the_caller_decides(traceparent: str, ratio: float, *, is_recorded: bool) -> None:
    """A call is recorded if its caller's span is; if that says nothing, by the ratio."""
    async with traced(ratio) as (server, collected):
        await server.put(b"k", traceparent)
    assert len(collected.named("KV.Put")) == len(collected.named("commit")) == is_recorded


async def test_one_trace_goes_from_the_program_to_the_store(program: TracerProvider) -> None:
    """The span of the client is the parent of the server's, which links to its commit, of which
    the request to the store is a child.
    """
    async with traced() as (server, collected), Client(server.listen) as client:
        with program.get_tracer("program").start_as_current_span("program") as span:
            await client.put(b"k", b"v")
        context = span.get_span_context()
    (put,) = collected.named("Session.put")
    assert put.trace_id == f"{context.trace_id:032x}"
    assert put.parent_id not in {"", f"{context.span_id:016x}"}  # that of the client's span
    (commit,) = collected.named("commit")
    assert put.links == {commit.span_id}
    assert commit.links == {put.span_id}
    (request,) = collected.children(commit)
    assert request.name == "create wal"
    assert request.began_ns >= commit.began_ns
    assert put.attributes["rpc.response.status_code"] == "OK"
    assert put.attributes["shalekv.commit.wal_id"] == commit.attributes["shalekv.commit.wal_id"]


async def test_each_operation_of_a_session_has_its_own_parent(program: TracerProvider) -> None:
    """Calls that share a message belong to the spans of their callers; so do those with a task."""
    tracer = program.get_tracer("program")
    parents = []

    async def put(client: Client, key: bytes) -> None:
        with tracer.start_as_current_span("program") as span:
            parents.append(f"{span.get_span_context().trace_id:032x}")
            await client.txn([Missing(key)], then=[Put(key, b"v"), Get(key)])

    async with traced() as (server, collected), Client(server.listen) as client:
        await asyncio.gather(*(put(client, b"%d" % number) for number in range(3)))
    calls = collected.named("Session.txn")
    assert sorted(call.trace_id for call in calls) == sorted(parents)
    commits = {commit.span_id for commit in collected.named("commit")}
    assert all(len(call.links & commits) == 1 for call in calls)


async def test_a_call_of_chance_tells_its_trace() -> None:
    """The reply to a call that is recorded by chance has the id of the trace."""
    async with (
        traced(1.0) as (server, collected),
        grpc.aio.insecure_channel(server.listen) as channel,
    ):
        call = kv_pb2_grpc.KVStub(channel).Get(kv_pb2.GetRequest(key=b"k"))
        metadata = dict(await call.initial_metadata() or ())
        await call
    (get,) = collected.named("KV.Get")
    assert metadata[TRACE_ID] == get.trace_id


async def test_a_read_tells_which_blocks_it_has_fetched() -> None:
    """A read of the levels has its requests as children, and counts of SSTs and blocks; the next
    one finds the block in memory. The merge before is a span, too.
    """
    objects = MemoryObjects()
    async with serving(memory_store(objects)) as served, Client(served.listen) as client:
        await client.put(b"k", b"v")
    async with collector() as collected:
        await compact(memory_store(objects), collected.url)
    *_, merge = collected.named("compaction")
    assert merge.attributes["shalekv.compaction.kind"] == "wal"
    assert merge.resource["shalekv.role"] == "compactor"
    assert "create levels" in {span.name for span in collected.children(merge)}
    async with (
        traced(1.0, memory_store(objects)) as (server, collected),
        Client(server.listen, coalesce=False) as client,
    ):
        for _ in range(2):
            assert await client.get(b"k") is not None
    first, second = sorted(collected.named("KV.Get"), key=lambda span: span.began_ns)
    requests = collected.children(first)
    assert {(span.name, span.kind) for span in requests} == {("get_range levels", "CLIENT")}
    assert first.attributes["shalekv.read.ssts_searched"] == 1
    assert first.attributes["shalekv.read.blocks_fetched"] == 1
    assert collected.children(second) == []
    assert second.attributes.get("shalekv.read.blocks_fetched", 0) == 0


async def compact(store: ObjectStore, url: str) -> None:
    settings = small_settings(wal_trigger_bytes=1)
    with real_runtime() as runtime:
        parts = OwnProcessParts(CasStore(store, runtime, settings.store))
        target = CompactionTarget(store, runtime, parts)
        async with open_tracer(TelemetrySettings(otlp_endpoint=url), "compactor") as tracer:
            assert await Compactors([target], settings, tracer=tracer).run_once() == [None]


async def test_a_failed_call_tells_its_status() -> None:
    """A span has the status of its call; a mistake of the caller is no failure of the server."""
    async with traced(1.0) as (server, collected), Client(server.listen, coalesce=False) as client:
        with pytest.raises(ShaleKVError):
            await client.put(b"", b"v")
    (put,) = collected.named("KV.Put")
    assert put.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert not put.is_failed


async def test_an_unreachable_collector_fails_no_call() -> None:
    """Calls succeed while nobody takes spans, and the end of the server is not delayed."""
    settings = TelemetrySettings(otlp_endpoint="http://127.0.0.1:1", trace_ratio=1)
    async with (
        open_tracer(settings, "writer", "memory://test") as tracer,
        serving(memory_store(), None, tracer) as served,
        Client(served.listen) as client,
    ):
        for number in range(20):
            await client.put(b"%d" % number, b"v")


async def test_the_environment_sets_headers_and_compression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for all exporters of OpenTelemetry; what is said of traces takes precedence."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20a,x=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Bearer%20b")
    for compression in ("gzip", "deflate", "none", ""):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
        async with collector() as collected:
            settings = TelemetrySettings(otlp_endpoint=collected.url)
            async with open_tracer(settings, "compactor") as tracer:
                with recorded_job(tracer, "compaction"):
                    pass
        assert [span.name for span in collected.spans] == ["compaction"]
        (headers,) = collected.headers
        assert headers["authorization"] == "Bearer b"
        assert "x" not in headers
        assert headers.get("content-encoding", "") == compression.removesuffix("none")
