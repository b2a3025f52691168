"""gRPC's interop cases for a client, as functions of a channel: the server must be another's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from shalekv_wire.calls import Channel, ClientStream
from shalekv_wire.status import CallFailed, StatusCode
from tests.wire.interop.messages import SERVICE, messages, sized

Case = Callable[[Channel], Awaitable[None]]

LARGE_REQUEST_BYTES, LARGE_REPLY_BYTES = 271_828, 314_159
REQUEST_SIZES = (27_182, 8, 1_828, 45_904)
REPLY_SIZES = (31_415, 9, 2_653, 58_979)
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"


async def empty_unary(channel: Channel) -> None:
    assert await channel.unary(f"{SERVICE}EmptyCall", b"") == b""


async def large_unary(channel: Channel) -> None:
    reply = await _unary(channel, LARGE_REPLY_BYTES, payload=sized(LARGE_REQUEST_BYTES))
    assert reply.payload.body == bytes(LARGE_REPLY_BYTES)


async def client_streaming(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}StreamingInputCall")
    for size in REQUEST_SIZES:
        request = messages.StreamingInputCallRequest(payload=sized(size))
        await stream.write(request.SerializeToString())
    await stream.done_writing()
    data = await stream.read()
    assert data is not None
    reply = messages.StreamingInputCallResponse.FromString(data)
    assert reply.aggregated_payload_size == sum(REQUEST_SIZES)
    assert await stream.read() is None


async def server_streaming(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}StreamingOutputCall")
    await stream.write(_asking(*REPLY_SIZES))
    await stream.done_writing()
    assert [await _size(stream) for _ in REPLY_SIZES] == [*REPLY_SIZES]
    assert await stream.read() is None


async def ping_pong(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}FullDuplexCall")
    for asked, sent in zip(REPLY_SIZES, REQUEST_SIZES, strict=True):
        await stream.write(_asking(asked, payload=sized(sent)))
        assert await _size(stream) == asked
    await stream.done_writing()
    assert await stream.read() is None


async def empty_stream(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}FullDuplexCall")
    await stream.done_writing()
    assert await stream.read() is None


async def cancel_after_begin(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}StreamingInputCall")
    stream.cancel()
    assert (await _failure(stream.read())).code == StatusCode.CANCELLED


async def cancel_after_first_response(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}FullDuplexCall")
    await stream.write(_asking(REPLY_SIZES[0], payload=sized(REQUEST_SIZES[0])))
    assert await _size(stream) == REPLY_SIZES[0]
    stream.cancel()
    assert (await _failure(stream.read())).code == StatusCode.CANCELLED


async def timeout_on_sleeping_server(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}FullDuplexCall", timeout_s=0.001)
    assert (await _failure(_write_and_read(stream))).code == StatusCode.DEADLINE_EXCEEDED


async def status_code_and_message(channel: Channel) -> None:
    status = messages.EchoStatus(code=StatusCode.UNKNOWN, message="test status message")
    await _check_status(channel, status)


async def special_status_message(channel: Channel) -> None:
    await _check_status(channel, messages.EchoStatus(code=StatusCode.UNKNOWN, message=SPECIAL))


async def unimplemented_method(channel: Channel) -> None:
    failed = await _failure(channel.unary(f"{SERVICE}UnimplementedCall", b""))
    assert failed.code == StatusCode.UNIMPLEMENTED


async def unimplemented_service(channel: Channel) -> None:
    failed = await _failure(
        channel.unary("/grpc.testing.UnimplementedService/UnimplementedCall", b"")
    )
    assert failed.code == StatusCode.UNIMPLEMENTED


async def server_compressed_unary(channel: Channel) -> None:
    for is_compressed in (True, False):
        reply = await _unary(
            channel,
            LARGE_REPLY_BYTES,
            payload=sized(LARGE_REQUEST_BYTES),
            response_compressed=messages.BoolValue(value=is_compressed),
        )
        assert reply.payload.body == bytes(LARGE_REPLY_BYTES)


async def server_compressed_streaming(channel: Channel) -> None:
    stream = channel.stream(f"{SERVICE}StreamingOutputCall")
    sizes = REPLY_SIZES[0], REPLY_SIZES[3]
    request = messages.StreamingOutputCallRequest()
    for size, is_compressed in zip(sizes, (True, False), strict=True):
        compressed = messages.BoolValue(value=is_compressed)
        request.response_parameters.add(size=size, compressed=compressed)
    await stream.write(request.SerializeToString())
    await stream.done_writing()
    assert [await _size(stream) for _ in sizes] == [*sizes]
    assert await stream.read() is None


async def concurrent_large_unaries(channel: Channel) -> None:
    """None of gRPC's: many calls share the windows of one connection."""
    async with asyncio.TaskGroup() as calls:
        for _ in range(64):
            calls.create_task(large_unary(channel))


CASES: Mapping[str, Case] = {
    case.__name__: case
    for case in (
        empty_unary,
        large_unary,
        client_streaming,
        server_streaming,
        ping_pong,
        empty_stream,
        cancel_after_begin,
        cancel_after_first_response,
        timeout_on_sleeping_server,
        status_code_and_message,
        special_status_message,
        unimplemented_method,
        unimplemented_service,
        server_compressed_unary,
        server_compressed_streaming,
        concurrent_large_unaries,
    )
}


async def _unary(channel: Channel, response_size: int, **fields: Any) -> Any:
    request = messages.SimpleRequest(response_size=response_size, **fields)
    data = await channel.unary(f"{SERVICE}UnaryCall", request.SerializeToString())
    return messages.SimpleResponse.FromString(data)


def _asking(*sizes: int, **fields: Any) -> bytes:
    request = messages.StreamingOutputCallRequest(**fields)
    for size in sizes:
        request.response_parameters.add(size=size)
    data: bytes = request.SerializeToString()
    return data


async def _size(stream: ClientStream) -> int:
    data = await stream.read()
    assert data is not None
    return len(messages.StreamingOutputCallResponse.FromString(data).payload.body)


async def _write_and_read(stream: ClientStream) -> None:
    await stream.write(_asking(payload=sized(REQUEST_SIZES[0])))
    await stream.read()


async def _check_status(channel: Channel, status: Any) -> None:
    unary = messages.SimpleRequest(response_status=status).SerializeToString()
    stream = channel.stream(f"{SERVICE}FullDuplexCall")
    request = messages.StreamingOutputCallRequest(response_status=status)
    await stream.write(request.SerializeToString())
    await stream.done_writing()
    for call in (channel.unary(f"{SERVICE}UnaryCall", unary), stream.read()):
        failed = await _failure(call)
        assert (failed.code, failed.message) == (status.code, status.message)


async def _failure(call: Awaitable[object]) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await call
    return failed.value
