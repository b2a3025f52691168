"""grpcio as the other side of the interop cases: a server of the service, and a channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from shalekv_wire.status import CallFailed, Metadata, StatusCode
from tests.wire.interop.messages import ECHO_INITIAL, ECHO_TRAILING, SERVICE, messages, sized

MESSAGE_BYTES_MAX = 64 << 20
# A channel with subchannels of its own: each test has a connection of its own.
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]


@asynccontextmanager
async def grpcio_served(address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """The service on grpcio, on a free port; yields its address."""
    server = grpc.aio.server(options=OPTIONS, compression=grpc.Compression.NoCompression)
    server.add_generic_rpc_handlers((_Methods(),))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class _Methods(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        name = handler_call_details.method.removeprefix(SERVICE)
        return {
            "EmptyCall": grpc.unary_unary_rpc_method_handler(_empty),
            "UnaryCall": grpc.unary_unary_rpc_method_handler(_unary),
            "StreamingOutputCall": grpc.unary_stream_rpc_method_handler(_output),
            "StreamingInputCall": grpc.stream_unary_rpc_method_handler(_input),
            "FullDuplexCall": grpc.stream_stream_rpc_method_handler(_duplex),
        }.get(name)


async def _empty(_request: bytes, context: Any) -> bytes:
    await _echo(context)
    return b""


async def _unary(data: bytes, context: Any) -> Any:
    request = messages.SimpleRequest.FromString(data)
    await _echo(context)
    if request.response_compressed.value:
        context.set_compression(grpc.Compression.Gzip)
    await _abort(context, request)
    return messages.SimpleResponse(payload=sized(request.response_size)).SerializeToString()


async def _output(data: bytes, context: Any) -> AsyncIterator[bytes]:
    await _echo(context)
    async for reply in _replies(data, context):
        yield reply


async def _duplex(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    await _echo(context)
    async for data in requests:
        async for reply in _replies(data, context):
            yield reply


async def _input(requests: AsyncIterator[bytes], _context: Any) -> Any:
    sizes = [
        len(messages.StreamingInputCallRequest.FromString(data).payload.body)
        async for data in requests
    ]
    reply = messages.StreamingInputCallResponse(aggregated_payload_size=sum(sizes))
    return reply.SerializeToString()


async def _replies(data: bytes, context: Any) -> AsyncIterator[bytes]:
    request = messages.StreamingOutputCallRequest.FromString(data)
    if any(each.compressed.value for each in request.response_parameters):
        context.set_compression(grpc.Compression.Gzip)
    for each in request.response_parameters:
        reply = messages.StreamingOutputCallResponse(payload=sized(each.size))
        yield reply.SerializeToString()
    await _abort(context, request)


async def _echo(context: Any) -> None:
    found = dict(context.invocation_metadata())
    if ECHO_TRAILING in found:
        context.set_trailing_metadata(((ECHO_TRAILING, found[ECHO_TRAILING]),))
    if ECHO_INITIAL in found:
        await context.send_initial_metadata(((ECHO_INITIAL, found[ECHO_INITIAL]),))


async def _abort(context: Any, request: Any) -> None:
    status = request.response_status
    if status.code:
        codes = {code.value[0]: code for code in grpc.StatusCode}
        await context.abort(codes[status.code], status.message)


class GrpcioChannel:
    """The client's transport over grpcio: what drives the cases against our server."""

    def __init__(self, address: str, *, compression: grpc.Compression | None = None) -> None:
        """`compression` is that of all requests."""
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, OPTIONS, compression)

    async def unary(
        self, path: str, request: bytes, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> bytes:
        call: Any = self._channel.unary_unary(path)
        reply: bytes = await _with_our_errors(
            lambda: call(request, timeout=timeout_s, metadata=metadata)
        )
        return reply

    def stream(
        self, path: str, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> _GrpcioStream:
        call: Any = self._channel.stream_stream(path)
        return _GrpcioStream(call(timeout=timeout_s, metadata=metadata))

    async def wait_ready(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self._channel.channel_ready()

    async def close(self) -> None:
        await self._channel.close()


class _GrpcioStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, message: bytes) -> None:
        await _with_our_errors(lambda: self._call.write(message))

    async def done_writing(self) -> None:
        await _with_our_errors(self._call.done_writing)

    async def read(self) -> bytes | None:
        message: Any = await _with_our_errors(self._call.read)
        return None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        self._call.cancel()


async def _with_our_errors(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        code = StatusCode(error.code().value[0])
        metadata = tuple((k, v) for k, v in error.trailing_metadata() or ())
        raise CallFailed(code, error.details() or "", metadata=metadata) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CallFailed(StatusCode.CANCELLED) from None
