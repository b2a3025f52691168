"""Traces of a process: the tracer that its settings ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.errors import InvalidSetting
from shalekv.settings.telemetry import JobTelemetrySettings, TelemetrySettings
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.tracing import Tracer


@asynccontextmanager
async def open_tracer(
    settings: JobTelemetrySettings, role: str, *urls: str
) -> AsyncIterator[Tracer | None]:
    """Open the tracer of a process of this role for the databases at `urls`; None: it has none.

    At the end the last spans are sent, which takes a second at most. Raises `InvalidSetting` if
    packages are missing. Without a collector they are not even imported.
    """
    if not settings.otlp_endpoint:
        yield None
        return
    try:
        from shalekv.telemetry.otel import OtelTracer  # noqa: PLC0415 (slow, and an extra)
    except ImportError as error:
        raise InvalidSetting(
            f"--otlp-endpoint needs {error.name}, which is not installed: "
            "pip install 'shalekv[otel]'"
        ) from None
    tracer = OtelTracer(
        settings.otlp_endpoint,
        ratio=settings.trace_ratio if isinstance(settings, TelemetrySettings) else 0.0,
        role=role,
        database_url=urls[0] if len(urls) == 1 else "",
    )
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def add_spans(metrics: Metrics, tracer: Tracer | None) -> None:
    """Add the spans that were dropped."""
    if tracer is not None:
        metrics.add("spans_dropped", tracer.dropped)
