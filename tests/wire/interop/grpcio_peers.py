"""grpcio as the other side of the interop cases: a server of the service, and a channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from shalekv_client.routing.grpcio_channel import GrpcioChannel
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


def grpcio_channel(
    address: str, compression: grpc.Compression = grpc.Compression.NoCompression
) -> GrpcioChannel:
    """The client's transport over grpcio; `compression` is that of all requests."""
    return GrpcioChannel(address, [*OPTIONS, ("grpc.default_compression_algorithm", compression)])
