"""The server of the wire over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shalekv_wire import frames
from shalekv_wire.connection import CONNECTION_WINDOW
from shalekv_wire.server import ServerOptions
from shalekv_wire.server_connection import CALL_OVERHEAD_BYTES
from shalekv_wire.status import CallFailed, StatusCode
from shalekv_wire.stream import MESSAGE_OVERHEAD_BYTES, STREAM_WINDOW, Limits
from tests.kit.constants import set_constants
from tests.kit.timeouts import until
from tests.wire.serving import (
    CHAT,
    ECHO,
    FLOOD,
    FLOOD_COUNT,
    LATER,
    PIECE,
    channel,
    raw_client,
    request,
    serving,
)

POLLS = 4  # without a change


async def test_replies_of_one_turn_leave_in_one_write() -> None:
    """Sixty calls that arrive together get their replies in one write, with 35 bytes around each.

    The first reply of a connection is larger: it brings the fields that later ones refer to.
    """
    async with serving() as it, raw_client(it.address) as client:
        client.send(request(1, ECHO, b"first"))
        await client.receive(frames.DATA)
        await client.receive(frames.HEADERS)
        (connection,) = it.server.connections
        writes: list[bytes] = []
        transport = connection._transport  # noqa: SLF001 - what reaches the transport is counted
        connection._transport = Counted(transport, writes)  # type: ignore[assignment] # noqa: SLF001
        calls = range(3, 123, 2)
        client.send(b"".join(request(stream_id, ECHO, b"m" * 100) for stream_id in calls))
        await until(lambda: b"".join(writes).count(b"m" * 100) == len(calls), "all replies")
        connection._transport = transport  # noqa: SLF001
        assert len(writes) == 1
        assert len(writes[0]) == len(calls) * (100 + 35)


class Unchanged:
    """A condition that holds when a count is above 0, and the same for some polls."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._seen: list[int] = []

    def __call__(self) -> bool:
        self._seen = [*self._seen, self._count()][-POLLS:]
        return len(self._seen) == POLLS and len(set(self._seen)) == 1 and self._seen[0] > 0


class Counted:
    """A transport that also keeps what is written."""

    def __init__(self, transport: asyncio.Transport, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()


async def test_a_call_ends_at_its_deadline() -> None:
    """A unary call that nobody answers, and a stream that waits, end with DEADLINE_EXCEEDED."""
    async with serving() as it, raw_client(it.address) as client:
        client.send(request(1, LATER, b"", (b"grpc-timeout", b"30m")))
        _, flags, stream_id, block = await client.receive(frames.HEADERS)
        assert (flags & frames.END_STREAM, stream_id) == (frames.END_STREAM, 1)
        assert b"grpc-status\x014" in block
        assert it.methods.cancelled == 1
        head = request(3, CHAT, b"", (b"grpc-timeout", b"30m"))
        client.send(head[: head.index(b"\0" * 5) - 9])  # without the message and the end
        _, _, stream_id, block = await client.receive(frames.HEADERS)
        assert stream_id == 3
        assert b"grpc-status\x014" in block
        await it.methods.ended.wait()


async def test_a_request_that_is_never_complete_ends_at_its_deadline() -> None:
    """A header alone does not hold a call for ever."""
    async with serving() as it, raw_client(it.address) as client:
        whole = request(1, ECHO, b"x" * 50, (b"grpc-timeout", b"30m"))
        client.send(whole[:-20])
        _, _, _, block = await client.receive(frames.HEADERS)
        assert b"grpc-status\x014" in block


async def test_a_cancelled_call_is_told_once() -> None:
    """A reset by the client, and a lost connection, reach the handler; a late reply is dropped."""
    async with serving() as it, channel(it.address) as client:
        reply = client.unary(LATER, b"")
        await until(lambda: len(it.methods.later) == 1, "a call")
        reply.cancel()
        await until(lambda: it.methods.cancelled == 1, "the cancellation")
        it.methods.later[0].reply(b"late")
        lost = client.unary(LATER, b"")
        chat = client.stream(CHAT)
        await chat.write(b"hello")
        assert await chat.read() == b"hello"
        await until(lambda: len(it.methods.later) == 2, "a call")
        await client.close()
        await until(lambda: it.methods.cancelled == 2, "the end of the connection")
        await it.methods.ended.wait()
        with pytest.raises(CallFailed, match="CANCELLED"):
            await lost


async def test_a_stream_waits_for_a_client_that_does_not_read() -> None:
    """No more than the windows and one buffer is sent ahead; all arrives when it is read."""
    async with serving() as it, channel(it.address) as client:
        call = client.stream(FLOOD)
        await call.done_writing()
        await until(Unchanged(lambda: it.methods.flooded), "a stream that waits")
        assert it.methods.flooded * len(PIECE) <= 2 * STREAM_WINDOW
        assert await client.unary(ECHO, b"other") == b"other"  # other calls go on
        count = 0
        while (piece := await call.read()) is not None:
            assert piece == PIECE
            count += 1
        assert count == FLOOD_COUNT


async def test_a_client_cannot_send_ahead_of_the_reader() -> None:
    """A stream whose handler reads nothing takes one window, and the connection still serves."""
    async with serving() as it, channel(it.address) as client:
        chat = client.stream(CHAT)  # whose echoes are not read: its handler stops to read
        written = 0
        opened = 500 + CALL_OVERHEAD_BYTES  # at most, for the call itself
        writer = asyncio.create_task(_write_all(chat))
        await until(Unchanged(lambda: it.server.received.held), "a client that waits")
        (connection,) = it.server.connections
        kept = STREAM_WINDOW // len(PIECE) + 1  # messages
        assert it.server.received.held <= opened + STREAM_WINDOW + kept * MESSAGE_OVERHEAD_BYTES
        assert await client.unary(ECHO, b"other") == b"other"
        while written < 200:
            assert await chat.read() == PIECE
            written += 1
        await writer
        assert it.server.received.held <= opened
        await chat.done_writing()
        assert await chat.read() is None
        assert it.server.received.held == 0
        assert connection in it.server.connections


async def _write_all(chat: object) -> None:
    for _ in range(200):
        await chat.write(PIECE)  # type: ignore[attr-defined]


async def test_a_message_over_the_limit_ends_its_call_alone() -> None:
    """The call gets RESOURCE_EXHAUSTED with limit and size; others go on."""
    options = ServerOptions(limits=Limits(message_bytes_max=100_000))
    async with serving(options) as it, channel(it.address) as client:
        with pytest.raises(CallFailed, match=r"100000 bytes \(message_bytes_max\)") as failed:
            await client.unary(ECHO, b"x" * 100_001)
        assert failed.value.code is StatusCode.RESOURCE_EXHAUSTED
        assert await client.unary(ECHO, b"x" * 100_000) == b"x" * 100_000


async def test_incomplete_messages_of_all_connections_are_bounded() -> None:
    """A message that would exceed the bound is refused, and nothing of it is kept."""
    options = ServerOptions(limits=Limits(received_bytes_max=300_000))
    async with serving(options) as it, channel(it.address) as client:
        with pytest.raises(CallFailed, match="too many messages are incomplete"):
            await client.unary(ECHO, b"x" * 1_000_000)
        assert it.server.received.held == 0
        assert await client.unary(ECHO, b"x" * 200_000) == b"x" * 200_000


async def test_a_flood_of_inflated_messages_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that makes the server inflate 4 MiB from 4 KiB again and again is sent away."""
    set_constants(monkeypatch, {"shalekv_wire.stream:ALLOWANCE_PER_S": 0})  # however slow it is
    async with serving() as it, raw_client(it.address) as client:
        small = gzip.compress(bytes(4_000_000))
        body = b"\1" + len(small).to_bytes(4, "big") + small
        for stream_id in range(1, 101, 2):
            whole = request(stream_id, LATER, b"", (b"grpc-encoding", b"gzip"))
            client.send(whole[: whole.index(b"\0" * 5) - 9])
            client.send(frames.frame(frames.DATA, frames.END_STREAM, stream_id, body))
        _, _, _, goaway = await client.receive(frames.GOAWAY)
        assert frames.parse_goaway(goaway)[1] == frames.ErrorCode.ENHANCE_YOUR_CALM


async def test_a_stop_answers_calls_in_progress_and_refuses_none() -> None:
    """Calls in progress at a stop are answered; the client opens its next connection elsewhere."""
    async with serving() as it, channel(it.address) as client:
        reply = client.unary(LATER, b"")
        await until(lambda: len(it.methods.later) == 1, "a call")
        stopping = asyncio.create_task(it.server.stop(10))
        assert not (await asyncio.wait([stopping], timeout=0.05))[0]
        it.methods.later[0].reply(b"answer")
        assert await reply == b"answer"
        await stopping
        with pytest.raises(CallFailed) as failed:
            await client.unary(ECHO, b"")
        assert failed.value.is_unsent


async def test_connections_that_say_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a preface, no preface, and a connection without calls: each has its time."""
    set_constants(monkeypatch, {"shalekv_wire.server:CHECK_INTERVAL_S": 0.1})
    options = ServerOptions(handshake_timeout_s=0.5, idle_s=0.5)
    async with serving(options) as it:
        async with (
            raw_client(it.address, greets=False) as silent,
            raw_client(it.address, greets=False) as half,
            raw_client(it.address) as idle,
        ):
            half.send(frames.PREFACE[:10])
            await silent.receive_end()
            with suppress(ConnectionResetError):  # if the server has not read what was sent
                await half.receive_end()
            _, _, _, goaway = await idle.receive(frames.GOAWAY)
            assert frames.parse_goaway(goaway)[:2] == (frames.WINDOW_MAX, 0)
            await idle.receive_end()
        await until(lambda: not it.server.connections, "no connection")


async def test_old_connections_are_replaced_without_a_failed_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that reaches its age is asked to go; calls go on over the next one."""
    set_constants(monkeypatch, {"shalekv_wire.server:CHECK_INTERVAL_S": 0.1})
    async with serving(ServerOptions(age_s=0.1)) as it, channel(it.address) as client:
        assert await client.unary(ECHO, b"x") == b"x"
        first = [*it.server.connections]
        while first[0] in it.server.connections:
            assert await client.unary(ECHO, b"x") == b"x"
        assert await client.unary(ECHO, b"x") == b"x"


async def test_a_client_of_something_else_is_sent_away() -> None:
    """A request of HTTP/1.1 ends its connection with a GOAWAY that says why."""
    async with serving() as it, raw_client(it.address, greets=False) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        assert b"this is no client of HTTP/2" in await client.receive_end()


async def test_unix_sockets_and_ipv6(tmp_path: Path) -> None:
    """Addresses of both kinds are served and called."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "s"))
    sock.listen()
    address = f"unix:{tmp_path / 's'}"
    async with serving(sock=sock, address=address), channel(address) as client:
        assert await client.unary(ECHO, b"x") == b"x"
    six = socket.create_server(("::1", 0), family=socket.AF_INET6)
    address = f"[::1]:{six.getsockname()[1]}"
    large = b"x" * (CONNECTION_WINDOW - 100)
    async with serving(sock=six, address=address), channel(address) as client:
        assert await client.unary(ECHO, large) == large


async def test_a_client_may_ping_after_each_message() -> None:
    """Pings between the messages of one stream do no harm, also when the window stays the same.

    grpcio measures the network so: it returns the window, and pings, after each small message.
    """
    async with serving() as it, raw_client(it.address) as client:
        opening = request(1, CHAT, b"")
        client.send(opening[: opening.index(b"\0" * 5) - 9])  # without the message and the end
        message = frames.frame(frames.DATA, 0, 1, b"\0\0\0\0\x05hello")
        for number in range(8):
            client.send(message)
            *_, data = await client.receive(frames.DATA)
            size = len(data)
            client.send(frames.window_update(0, size) + frames.window_update(1, size))
            client.send(frames.frame(frames.PING, 0, 0, b"%08d" % number))
            _, flags, _, echo = await client.receive(frames.PING)
            assert (flags, echo) == (frames.ACK, b"%08d" % number)


async def test_connections_may_be_accepted_elsewhere() -> None:
    """A connection that others have accepted is served as any; one that is gone does no harm."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        host, port = listener.getsockname()
        async with serving() as served, channel(f"{host}:{port}") as client:
            with socket.create_connection((host, port)):
                gone, _ = await loop.sock_accept(listener)
            served.server.adopt(gone)
            reply = asyncio.ensure_future(client.unary(ECHO, b"hello"))
            accepted, _ = await loop.sock_accept(listener)
            served.server.adopt(accepted)
            assert await reply == b"hello"
            await until(lambda: len(served.server.connections) == 1, "the end of the first")
