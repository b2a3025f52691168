"""Spans of the pipeline: jobs on the driver, and tasks elsewhere as their children."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shalekv_spark import spans
from shalekv_spark.spans import job_span, task_span
from shalekv_wire.trace_context import parse_traceparent
from tests.servers.otlp import collector

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans of a driver whose program has configured OpenTelemetry."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """A process that has recorded no task yet."""
    spans.tracer_of_task.cache_clear()
    yield
    spans.tracer_of_task.cache_clear()


def fail_job() -> None:
    with job_span("shalekv.load", {"shalekv.load.id": "users"}) as traceparent:
        assert parse_traceparent(traceparent) is not None
        raise ValueError("a secret key")


def test_a_job_is_a_span_without_messages(exported: InMemorySpanExporter) -> None:
    """A job that fails tells the type of its error alone."""
    with pytest.raises(ValueError, match="secret"):
        fail_job()
    (span,) = exported.get_finished_spans()
    assert span.name == "shalekv.load"
    assert dict(span.attributes or {}) == {"shalekv.load.id": "users", "error.type": "ValueError"}
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "secret" not in span.to_json()


def test_a_job_is_not_recorded_without_a_provider() -> None:
    """Where the program records nothing, tasks are not told a span, and record none."""
    with job_span("shalekv.load", {}) as traceparent, task_span("task", traceparent, {}):
        assert traceparent == ""
        assert not trace.get_current_span().is_recording()
    assert not spans.tracer_of_task.cache_info().misses


async def test_a_task_sends_its_span_as_its_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process of an executor, in which nobody configures OpenTelemetry, follows `OTEL_*`."""

    def work() -> None:
        with task_span("shalekv.load.task", TRACEPARENT, {"spark.partition": 3}):
            assert trace.get_current_span().is_recording()

    async with collector() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        await asyncio.to_thread(work)
    (span,) = collected.spans
    assert (span.name, span.trace_id, span.parent_id) == ("shalekv.load.task", "a" * 32, "b" * 16)
    assert span.attributes == {"spark.partition": 3}
