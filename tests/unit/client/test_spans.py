"""Spans of the client, in a program that records its own, and in one that does not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import wait

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from shalekv.errors import InvalidRequest
from shalekv_client import Client, NotApplied, RetryPolicy, SyncClient
from shalekv_client.one_call import OneCallClient
from shalekv_wire.trace_context import parse_traceparent
from tests.kit.serving.dict_server import DictServer, bare, refusing


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans of a program that has configured OpenTelemetry."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def named(exported: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = [span for span in exported.get_finished_spans() if span.name == name]
    return span


def told(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


@pytest.mark.parametrize("coalesce", [True, False], ids=["session", "unary"])
async def test_the_server_gets_the_span_of_the_client(
    server: DictServer, exported: InMemorySpanExporter, *, coalesce: bool
) -> None:
    """A call has a span, a child of that of the program, and the server gets its name."""
    tracer = trace.get_tracer_provider().get_tracer("program")
    async with Client(server.address, coalesce=coalesce) as client:
        with tracer.start_as_current_span("program"):
            await client.put(b"k", b"v")
        await client.get(b"k")
    program, put, get = (
        named(exported, name) for name in ("program", "shalekv.put", "shalekv.get")
    )
    assert put.parent == program.get_span_context()
    assert get.parent is None
    assert server.state.traceparents == [told(put), told(get)]
    host, port = server.address.split(":")
    assert put.kind is trace.SpanKind.CLIENT
    assert dict(put.attributes or {}) == {
        "db.system.name": "shalekv",
        "db.operation.name": "put",
        "server.address": host,
        "server.port": int(port),
        "shalekv.attempts": 1,
    }


async def test_scans_and_sessions_have_spans(
    server: DictServer, client: Client, exported: InMemorySpanExporter
) -> None:
    """So have scans, and each operation of an explicit session."""
    async with client.session() as session:
        written = [session.put(b"k", b"v"), session.delete(b"k")]
    await asyncio.gather(*written)
    async for _ in client.scan():
        pass
    spans = exported.get_finished_spans()
    assert [span.name for span in spans] == ["shalekv.put", "shalekv.delete", "shalekv.scan"]
    assert server.state.traceparents == [told(span) for span in spans]


async def test_failed_attempts_are_events(
    server: DictServer, exported: InMemorySpanExporter
) -> None:
    """A span counts the attempts, says why they failed, and has no message of an error."""
    retry = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=1)
    server.state.failures.append(bare(grpc.StatusCode.UNAVAILABLE))
    async with Client(server.address, coalesce=False, retry=retry) as client:
        await client.put(b"k", b"v")
        server.state.failures.append(refusing(InvalidRequest("key", "secret key")))
        with pytest.raises(NotApplied):
            await client.delete(b"k")
    put, delete = named(exported, "shalekv.put"), named(exported, "shalekv.delete")
    assert (put.attributes or {})["shalekv.attempts"] == 2
    (event,) = put.events
    assert event.name == "attempt failed"
    assert (event.attributes or {})["error.type"] == "ConnectionLost"
    assert put.status.is_unset
    assert not delete.status.is_ok
    assert (delete.attributes or {})["error.type"] == "INVALID_REQUEST"
    assert (delete.attributes or {})["db.response.status_code"] == "INVALID_ARGUMENT"
    assert "secret" not in delete.to_json()


async def test_threads_have_their_own_parents(
    server: DictServer, exported: InMemorySpanExporter
) -> None:
    """With the client for threads, spans are children of the present span of the caller."""
    tracer = trace.get_tracer_provider().get_tracer("program")

    def use() -> None:
        with SyncClient(server.address) as client:
            with tracer.start_as_current_span("first"):
                client.put(b"k", b"v")
            with client.session() as session, tracer.start_as_current_span("second"):
                wait([session.delete(b"k")])

    await asyncio.to_thread(use)
    for child, parent in (("shalekv.put", "first"), ("shalekv.delete", "second")):
        span = named(exported, child)
        assert span.parent == named(exported, parent).get_span_context()
        assert told(span) in server.state.traceparents


async def test_the_decision_not_to_record_is_told(
    server: DictServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that does not record a call tells the server so."""
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    await client.get(b"k")
    (traceparent,) = server.state.traceparents
    context = parse_traceparent(traceparent)
    assert context is not None
    assert not context.is_sampled


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_without_a_provider_nothing_is_told(
    server: DictServer, client: Client, monkeypatch: pytest.MonkeyPatch, *, is_loaded: bool
) -> None:
    """Where the program records nothing, no span is made, and the server gets no name."""
    if not is_loaded:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    await client.put(b"k", b"v")
    assert server.state.traceparents == [""]
    assert ("opentelemetry.trace" in sys.modules) is is_loaded


async def test_one_call_passes_a_span_on(server: DictServer) -> None:
    """A client of one call gives each attempt the span that it was told."""
    named_span = f"00-{'a' * 32}-{'b' * 16}-01"

    def use() -> None:
        client = OneCallClient(
            server.address, lambda: Client(""), timeout_ms=5_000, traceparent=named_span
        )
        with pytest.raises(StopIteration):
            client.get(b"k").send(None)

    await asyncio.to_thread(use)
    assert server.state.traceparents == [named_span]
