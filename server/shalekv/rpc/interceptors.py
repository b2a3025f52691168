"""The access log: one debug line for each call, with peer, code and duration.

It is installed only when debug lines are shown, since it costs each call some microseconds.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import structlog

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Behaviour: TypeAlias = Callable[..., Any]  # (request or requests, context)

_log = structlog.get_logger(__name__)


class AccessLog(grpc.aio.ServerInterceptor):
    """Logs each call when it is over, however it ended."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The handler of the method, with its end logged; an unknown method is logged here."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            _log.debug("unknown method", method=method)
            return None
        return _with_behaviour(handler, lambda behaviour: _logged(behaviour, method))


def _with_behaviour(handler: _Handler, change: Callable[[_Behaviour], _Behaviour]) -> _Handler:
    """A copy of `handler` that does what `change` makes of its behaviour."""
    parsing = (handler.request_deserializer, handler.response_serializer)
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(change(handler.unary_unary), *parsing)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(change(handler.unary_stream), *parsing)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(change(handler.stream_unary), *parsing)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(change(handler.stream_stream), *parsing)
    return handler


def _logged(behaviour: _Behaviour, method: str) -> _Behaviour:
    def watch(context: _Context) -> None:
        began_s = time.monotonic()
        peer = context.peer()

        def log(ended: _Context) -> None:
            duration_ms = round((time.monotonic() - began_s) * 1000.0, 3)
            _log.debug("call", method=method, peer=peer, code=_code(ended), duration_ms=duration_ms)

        # The stubs want an instance of a class that exists in the stubs alone.
        context.add_done_callback(log)  # type: ignore[arg-type]

    # grpc.aio tells streams that yield from streams that write by the kind of the function.
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: _Context) -> AsyncIterator[Any]:
            watch(context)
            async for reply in behaviour(request, context):
                yield reply

        return generate

    async def answer(request: Any, context: _Context) -> Any:
        watch(context)
        return await behaviour(request, context)

    return answer


def _code(context: _Context) -> str:
    code: grpc.StatusCode | None = context.code()
    if code is not None:
        return code.name
    return grpc.StatusCode.OK.name if context.done() else grpc.StatusCode.CANCELLED.name
