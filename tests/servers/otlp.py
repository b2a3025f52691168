"""A collector of OpenTelemetry: takes spans over HTTP (OTLP), and keeps them for a test.

async with collector() as collected:
    ... collected.url is what `--otlp-endpoint` takes ...
    span = await collected.span("KV.Put")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Collected:
    """One span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: it has none
    kind: str  # SERVER, CLIENT, INTERNAL
    attributes: dict[str, str | int]
    resource: dict[str, str | int]
    links: frozenset[str]  # the ids of the spans that it links to
    events: tuple[str, ...]
    duration_ms: float
    began_ns: int
    is_failed: bool


@dataclass(slots=True)
class Collector:
    """The spans that have arrived so far."""

    url: str = ""
    spans: list[Collected] = field(default_factory=list)
    messages: list[trace_pb2.Span] = field(default_factory=list)  # the spans as they were sent
    headers: list[Mapping[str, str]] = field(default_factory=list)  # of all requests
    statuses: list[int] = field(default_factory=list)  # with which the next requests are refused
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def named(self, name: str) -> list[Collected]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Collected) -> list[Collected]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    async def span(
        self, name: str, found: Callable[[Collected], bool] = lambda _: True
    ) -> Collected:
        """Wait for a span with this name; return the first."""

        def matching() -> list[Collected]:
            return [span for span in self.named(name) if found(span)]

        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(matching)
        return matching()[0]

    async def take(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        message = ExportTraceServiceRequest.FromString(await request.read())
        async with self.changed:
            for group in message.resource_spans:
                resource = _values(group.resource.attributes)
                for scope in group.scope_spans:
                    self.messages += scope.spans
                    self.spans += [_collected(span, resource) for span in scope.spans]
            self.changed.notify_all()
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Run a collector on a free port of loopback."""
    collected = Collector()
    application = web.Application()
    application.router.add_post("/v1/traces", collected.take)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        collected.url = f"http://{host}:{port}"
        yield collected
    finally:
        await runner.cleanup()


def _collected(span: trace_pb2.Span, resource: dict[str, str | int]) -> Collected:
    return Collected(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        _values(span.attributes),
        resource,
        frozenset(link.span_id.hex() for link in span.links),
        tuple(event.name for event in span.events),
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6,
        span.start_time_unix_nano,
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _values(attributes: Iterable[KeyValue]) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in attributes}
