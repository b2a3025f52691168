"""Spans of calls, if the program that uses the client records any with OpenTelemetry.

The program configures OpenTelemetry; the client only uses what is loaded already, and imports
nothing of it by itself. Without it, a call costs one look-up more.

    span of the program
      +-- shalekv.put    of the client, with an event for each attempt that has failed
            +-- KV.Put   of the server, which gets `traceparent`
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from shalekv_client.errors import ShaleKVError
from shalekv_wire.trace_context import SpanContext

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from shalekv_client.routing.servers import Server

ResultT = TypeVar("ResultT")

_API = "opentelemetry.trace"


def begin_span(name: str) -> CallSpan | None:
    """Begin the span of an operation, a child of the present one; None: there is no tracing."""
    if _API not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # none is configured
        return None
    span = provider.get_tracer("shalekv_client").start_span(
        f"shalekv.{name}",
        kind=trace.SpanKind.CLIENT,
        attributes={"db.system.name": "shalekv", "db.operation.name": name},
    )
    return CallSpan(span) if span.get_span_context().is_valid else None


class CallSpan:
    """The span of one operation, which may be sent several times."""

    __slots__ = ("_attempts", "_span", "traceparent")

    def __init__(self, span: Span) -> None:
        """Use a span that has begun."""
        context = span.get_span_context()
        named = SpanContext(
            f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled
        )
        self.traceparent = named.traceparent()
        self._span = span
        self._attempts = 0

    async def cover(
        self,
        send: Callable[[Server, float], Awaitable[ResultT]],
        run: Callable[[Callable[[Server, float], Awaitable[ResultT]]], Awaitable[ResultT]],
    ) -> ResultT:
        """Return the result of `run`, which calls `send` for each attempt; end the span."""

        async def attempt(server: Server, left_ms: float) -> ResultT:
            self.sent_to(server.address)
            try:
                return await send(server, left_ms)
            except ShaleKVError as error:
                self._span.add_event(
                    "attempt failed",
                    {"server.address": server.address, "error.type": _type_of(error)},
                )
                raise

        try:
            result = await run(attempt)
        except BaseException as error:
            self.end(error)
            raise
        self.end(None)
        return result

    def sent_to(self, address: str) -> None:
        """Note an attempt at the server with this address."""
        self._attempts += 1
        host, _, port = address.rpartition(":")
        if not port.isdigit():  # unix:PATH
            self._span.set_attribute("server.address", address)
            return
        self._span.set_attribute("server.address", host.strip("[]"))
        self._span.set_attribute("server.port", int(port))

    def end(self, error: BaseException | None) -> None:
        """End the span; `error` is that of the operation, if it has failed."""
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        span.set_attribute("shalekv.attempts", self._attempts)
        if isinstance(error, ShaleKVError):
            span.set_attribute("db.response.status_code", error.code)
        if error is not None:
            span.set_attribute("error.type", _type_of(error))
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def end_with(self, future: Any) -> None:
        """End the span with a future of `asyncio` or `concurrent.futures` that is done."""
        self.end(None if future.cancelled() else future.exception())


def _type_of(error: BaseException) -> str:
    """Return what has failed: no message, in which there may be keys."""
    reason = error.reason if isinstance(error, ShaleKVError) else ""
    return reason or type(error).__name__
