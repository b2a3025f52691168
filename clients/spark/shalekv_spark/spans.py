"""Spans of jobs and their tasks, if the program on the driver records any with OpenTelemetry.

    span of the program
      +-- shalekv.load          on the driver
            +-- shalekv.load.task   in a process of an executor, for each partition

Tasks get the name of the parent with what Spark sends to them. An executor has no program that
configures OpenTelemetry: if the packages are installed there, spans are sent as the variables
`OTEL_*` of its environment say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from shalekv_wire.trace_context import SpanContext, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

EXPORT_TIMEOUT_S = 2  # at the end of a task, which waits for it
Attributes: TypeAlias = Mapping[str, str | int]

_SCOPE = "shalekv_spark"


@contextmanager
def job_span(name: str, attributes: Attributes) -> Iterator[str]:
    """Record a job as a span; yields its name for tasks, empty if it is not recorded."""
    if "opentelemetry.trace" not in sys.modules:
        yield ""
        return
    from opentelemetry import trace  # noqa: PLC0415 - an extra, which the program has loaded

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # none is configured
        yield ""
        return
    with _recorded(provider.get_tracer(_SCOPE), name, attributes) as span:
        context = span.get_span_context()
        named = SpanContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", is_sampled=True)
        yield named.traceparent() if context.trace_flags.sampled else ""


@contextmanager
def task_span(name: str, traceparent: str, attributes: Attributes) -> Iterator[None]:
    """Record a task as a child of its job; nothing happens if that is not recorded."""
    parent = parse_traceparent(traceparent)
    if parent is None:
        yield
        return
    try:
        from opentelemetry import trace  # noqa: PLC0415 - an extra
        from opentelemetry.context import attach, detach  # noqa: PLC0415 - as above

        tracer = tracer_of_task()
    except ImportError:  # the executor does not have what the driver has
        yield
        return
    context = trace.SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    token = attach(trace.set_span_in_context(trace.NonRecordingSpan(context)))
    try:
        with _recorded(tracer, name, attributes):
            yield
    finally:
        detach(token)


@contextmanager
def _recorded(tracer: Tracer, name: str, attributes: Attributes) -> Iterator[Span]:
    """Record a span. Its failure has no message, in which there may be keys."""
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - as above

    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except GeneratorExit:  # Spark takes no more rows, as of `limit`
            raise
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise


@cache
def tracer_of_task() -> Tracer:
    """Return the tracer of this process: as it is configured, or one that `OTEL_*` configures."""
    from opentelemetry import trace  # noqa: PLC0415 - as above

    configured = trace.get_tracer_provider()
    if not isinstance(configured, trace.ProxyTracerProvider):
        return configured.get_tracer(_SCOPE)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - as above
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as above
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415 - as above

    # A process of Spark may be ended as soon as its task is, so a span is sent at once.
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)))
    return provider.get_tracer(_SCOPE)
