"""Traces of a process: the tracer that its settings ask for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shalekv.errors import InvalidSetting
from shalekv.settings.telemetry import JobTelemetrySettings, TelemetrySettings
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.tracing import Tracer

if TYPE_CHECKING:
    from shalekv.telemetry.otlp import TraceCollector


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
        _collector(settings.otlp_endpoint),
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


def _collector(endpoint: str) -> TraceCollector:
    """Return the collector at an address, with what the environment says of all exporters."""
    from opentelemetry.util.re import parse_env_headers  # noqa: PLC0415 (an extra)

    from shalekv.telemetry.otlp import TraceCollector  # noqa: PLC0415 (an extra)

    certificate, key = _of_exporters("CLIENT_CERTIFICATE"), _of_exporters("CLIENT_KEY")
    return TraceCollector(
        endpoint,
        headers=parse_env_headers(_of_exporters("HEADERS"), liberal=True),
        certificate_file=_of_exporters("CERTIFICATE"),
        client_files=(certificate, key) if certificate and key else certificate or None,
        compression=_of_exporters("COMPRESSION").strip().lower(),
    )


def _of_exporters(name: str) -> str:
    """Return a setting that exporters of spans have in common; empty: it is not set."""
    of_all = os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "") or of_all
