"""The service of gRPC's interop cases on our server, for clients of all languages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shalekv_wire.server import ServerCall, ServerOptions, StreamCall, Streaming, Unary, WireServer
from shalekv_wire.status import StatusCode
from shalekv_wire.stream import Limits
from tests.wire.interop.messages import ECHO_INITIAL, ECHO_TRAILING, SERVICE, messages, sized

NO_GRACE_S = 0.0
KINDS = ("ipv4", "ipv6", "unix")  # of addresses
OPTIONS = ServerOptions(limits=Limits(message_bytes_max=16 << 20))  # one case sends 10 MiB


def find(path: str) -> Unary | Streaming | None:
    """The handler of a method; None: the server does not have it."""
    return METHODS.get(path.removeprefix(SERVICE))


def bound(kind: str, folder: Path) -> socket.socket:
    """A listening socket of that kind."""
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "socket"))
        return listener
    if kind == "ipv6":
        return socket.create_server(("::1", 0), family=socket.AF_INET6)
    return socket.create_server(("127.0.0.1", 0))


@asynccontextmanager
async def served(
    sock: socket.socket | None = None, options: ServerOptions = OPTIONS
) -> AsyncIterator[str]:
    """The service on `sock`, or on a free port of this host; yields its address."""
    sock = sock or socket.create_server(("127.0.0.1", 0))
    name = sock.getsockname()
    server = WireServer(find, options)
    await server.serve(sock)
    try:
        yield _address(name)
    finally:
        await server.stop(NO_GRACE_S)


def _address(name: Any) -> str:
    """The address of a socket's name, as clients of gRPC write it."""
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"


def _empty(call: ServerCall, _request: bytes) -> None:
    _echo(call)
    call.reply(b"")


def _unary(call: ServerCall, data: bytes) -> None:
    request = messages.SimpleRequest.FromString(data)
    _echo(call)
    if request.response_compressed.value:
        call.compress()
    if request.response_status.code:
        _end(call, request)
    else:
        reply = messages.SimpleResponse(payload=sized(request.response_size))
        call.reply(reply.SerializeToString())


async def _output(call: StreamCall) -> None:
    data = await call.read()
    assert data is not None
    _echo(call)
    request = messages.StreamingOutputCallRequest.FromString(data)
    await _respond(call, request)
    _end(call, request)


async def _input(call: StreamCall) -> None:
    total = 0
    while (data := await call.read()) is not None:
        total += len(messages.StreamingInputCallRequest.FromString(data).payload.body)
    reply = messages.StreamingInputCallResponse(aggregated_payload_size=total)
    await call.write(reply.SerializeToString())
    call.end()


async def _duplex(call: StreamCall) -> None:
    _echo(call)
    while (data := await call.read()) is not None:
        request = messages.StreamingOutputCallRequest.FromString(data)
        await _respond(call, request)
        if request.response_status.code:
            _end(call, request)
            return
    call.end()


async def _respond(call: StreamCall, request: Any) -> None:
    if any(each.compressed.value for each in request.response_parameters):
        call.compress()
    for each in request.response_parameters:
        await _pause(each.interval_us * 1e-6)
        reply = messages.StreamingOutputCallResponse(payload=sized(each.size))
        await call.write(reply.SerializeToString())


def _echo(call: ServerCall) -> None:
    sent = dict(call.metadata)
    if ECHO_INITIAL in sent:
        call.set_header([(ECHO_INITIAL, sent[ECHO_INITIAL])])
    if ECHO_TRAILING in sent:
        call.set_trailers([(ECHO_TRAILING, sent[ECHO_TRAILING])])


async def _pause(seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        return


def _end(call: ServerCall, request: Any) -> None:
    status = request.response_status
    call.end(StatusCode(status.code), status.message)


METHODS: dict[str, Unary | Streaming] = {
    "EmptyCall": Unary(_empty),
    "UnaryCall": Unary(_unary),
    "StreamingOutputCall": Streaming(_output),
    "StreamingInputCall": Streaming(_input),
    "FullDuplexCall": Streaming(_duplex),
}
