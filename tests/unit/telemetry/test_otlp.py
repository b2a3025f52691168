"""`telemetry.otlp`: how spans reach a collector, and what becomes of those that do not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from shalekv.telemetry import otlp
from shalekv.telemetry.otlp import Spans, SpanSender, TraceCollector
from tests.servers.otlp import Collector, collector

NOWHERE = "http://127.0.0.1:1"
HANGS_S = 10
RESOURCE = [KeyValue(key="service.name", value=AnyValue(string_value="shalekv"))]
TRACE, SPAN = bytes(range(1, 17)), bytes(range(1, 9))


def sender_to(url: str) -> SpanSender:
    return SpanSender(TraceCollector(url), RESOURCE, time.perf_counter_ns)


@asynccontextmanager
async def collected_from() -> AsyncIterator[tuple[SpanSender, Collector]]:
    """A sender whose spans have arrived, or are lost, when this is left."""
    async with collector() as collected:
        sender = sender_to(collected.url)
        yield sender, collected
        await asyncio.to_thread(sender.close)


def add(sender: SpanSender, name: str = "KV.Put") -> None:
    def add_spans(spans: Spans, offset_ns: int) -> None:
        at_ns = time.perf_counter_ns() + offset_ns
        times = {"start_time_unix_nano": at_ns, "end_time_unix_nano": at_ns}
        spans.add(trace_id=TRACE, span_id=SPAN, name=name, **times)

    sender.add(add_spans, 1)


@pytest.mark.parametrize(
    ("statuses", "requests", "problem"),
    [
        ([503, 429], 3, ""),
        ([400], 1, "it answers with status 400"),
        ([307], 1, "it answers with status 307"),
        ([503] * 9, 3, "it answers with status 503"),
    ],
)
async def test_a_batch_is_tried_again_if_that_may_help(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], requests: int, problem: str
) -> None:
    """It is tried again until the time is over, unless the collector has refused it for good."""
    monkeypatch.setattr(otlp, "BATCH_DELAY_S", 0)
    monkeypatch.setattr(otlp, "RETRY_DELAY_S", 0.125)
    monkeypatch.setattr(otlp, "EXPORT_TIMEOUT_S", 0.75)
    with structlog.testing.capture_logs() as lines:
        async with collector() as collected:
            collected.statuses = statuses
            sender = sender_to(collected.url)
            add(sender)
            async with asyncio.timeout(20):
                while not (collected.spans or lines):  # noqa: ASYNC110 (it is a thread)
                    await asyncio.sleep(0)
            await asyncio.to_thread(sender.close)
    assert len(collected.headers) == requests
    assert [line["problem"] for line in lines] == [problem] * bool(problem)
    assert sender.dropped == bool(problem)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (TraceCollector("https://127.0.0.1:1", certificate_file="/missing.pem"), "/missing.pem"),
        (TraceCollector(NOWHERE, headers={"authorization": "Bearer €"}), "HEADERS is none of HTTP"),
        (TraceCollector("http://a..b"), "its address"),
    ],
)
def test_a_wrong_setting_is_told(wrong: TraceCollector, problem: str) -> None:
    """The line says what is wrong, without credentials, and the thread goes on."""
    with structlog.testing.capture_logs() as lines:
        sender = SpanSender(wrong, RESOURCE, time.perf_counter_ns)
        add(sender)
        sender.close()
    (line,) = lines
    assert problem in line["problem"]
    assert "Bearer" not in line["problem"]
    assert sender.dropped == 1


async def test_the_thread_ends_and_survives_bugs() -> None:
    """Spans that cannot be made are logged, others arrive, and nothing runs after the end."""

    def fail(_: Spans, offset_ns: int) -> None:
        raise AssertionError(offset_ns)

    with structlog.testing.capture_logs() as lines:
        async with collected_from() as (sender, collected):
            sender.add(fail, 1)
            add(sender)
    assert [span.name for span in collected.spans] == ["KV.Put"]
    assert [line["event"] for line in lines] == ["telemetry has failed"]
    assert "spans" not in {thread.name for thread in threading.enumerate()}


def test_an_unreachable_collector_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans that nobody takes are counted, with one line for many batches, and no error."""
    monkeypatch.setattr(otlp, "QUEUE_MAX", 3)
    monkeypatch.setattr(otlp, "BATCH_MAX", 1)
    monkeypatch.setattr(otlp, "EXPORT_TIMEOUT_S", 0.01)
    with structlog.testing.capture_logs() as lines:
        sender = sender_to(NOWHERE)
        for _ in range(10):
            add(sender)
        sender.close()
    assert sender.dropped == 10
    (line,) = lines
    assert (line["event"], line["problem"]) == ("spans are lost", "it does not answer")
    assert not caplog.records


def test_the_thread_ends_if_the_collector_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the end nobody waits for an answer, whatever time a batch has otherwise."""
    monkeypatch.setattr(otlp, "EXPORT_TIMEOUT_S", 10 * HANGS_S)
    monkeypatch.setattr(otlp, "CLOSE_TIMEOUT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = sender_to(f"http://127.0.0.1:{silent.getsockname()[1]}")
        add(sender)
        sender.close()
        for thread in threading.enumerate():
            if thread.name == "spans":
                thread.join(HANGS_S)
    assert sender.dropped == 1


async def test_what_the_queue_does_not_hold_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the collector is slow, spans wait in a bounded queue, and others are dropped."""
    monkeypatch.setattr(otlp, "QUEUE_MAX", 3)
    monkeypatch.setattr(otlp, "BATCH_MAX", 3)
    async with collected_from() as (sender, collected):
        for _ in range(3):
            add(sender)
        await collected.span("KV.Put")
        for _ in range(10):
            add(sender)
    assert len(collected.spans) + sender.dropped == 13
    assert len(collected.spans) >= 6
