"""How calls and connections of the server end, and what is kept of them."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from shalekv_wire import frames
from shalekv_wire.frames import END_STREAM, PREFACE
from shalekv_wire.headers import KEPT_BYTES_MAX, literal
from shalekv_wire.server import ServerCall, StreamCall, Streaming, Unary
from shalekv_wire.server_connection import CALL_OVERHEAD_BYTES
from shalekv_wire.status import CallFailed, StatusCode
from shalekv_wire.stream import Limits
from tests.kit.timeouts import until
from tests.wire.core import SILENT, STREAM, UNARY, Core, Frame, parsed
from tests.wire.serving import ECHO, LATER, channel, request, serving

HEAD_BYTES = 279 + CALL_OVERHEAD_BYTES  # of an open call of `request`
OTHER = "/test.Test/Other"  # the method of one test


async def test_connections_that_come_after_a_stop_are_closed() -> None:
    """A connection that was accepted before the stop, and handed over after it, is not served."""
    ours, theirs = socket.socketpair()
    async with serving() as it:
        await it.server.stop(0)
        it.server.adopt(ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        assert await reader.read() == b""
        writer.close()


async def test_many_replies_at_once_do_not_end_the_connection() -> None:
    """256 replies of 16 kB wait for the client in their streams, and not in the transport."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)  # as on a slow network
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    async with serving(sock=sock, address=address) as it, channel(address) as client:
        assert await client.unary(ECHO, b"x") == b"x"  # replies are short from now on
        message = b"x" * 16_000
        calls = [client.unary(LATER, b"") for _ in range(256)]
        await until(lambda: len(it.methods.later) == len(calls), "all calls")
        for call in it.methods.later:
            call.reply(message)
        assert set(await asyncio.gather(*calls)) == {message}


@pytest.mark.parametrize("end", [StreamCall.end, StreamCall.reset])
async def test_the_end_of_a_call_wakes_its_reader(end: Callable[[StreamCall], None]) -> None:
    """A handler that reads in one task and ends the call in another does not hang."""

    async def handle(call: StreamCall) -> None:
        reader = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        end(call)
        with pytest.raises(CallFailed, match="the call is over"):
            await reader
        it.methods.ended.set()

    async with serving() as it, channel(it.address) as client:
        it.methods.by_path[OTHER] = Streaming(handle)
        call = client.stream(OTHER)
        with suppress(CallFailed):
            await call.read()
        await it.methods.ended.wait()


async def test_a_reset_drops_what_was_not_read() -> None:
    """Messages that wait for the reader of a call are not counted when it has reset the call."""

    async def handle(call: StreamCall) -> None:
        await until(lambda: it.server.received.held > 4_000, "messages")
        call.reset()

    async with serving() as it, channel(it.address) as client:
        it.methods.by_path[OTHER] = Streaming(handle)
        call = client.stream(OTHER)
        for _ in range(4):
            await call.write(b"x" * 1_000)
        with pytest.raises(CallFailed, match="CANCELLED"):
            await call.read()
        assert it.server.received.held == 0


async def test_a_failed_call_of_a_handler_ends_its_own() -> None:
    """A handler that calls another server, and does not expect that to fail, passes it on."""

    async def handle(call: StreamCall) -> None:
        assert call.path == OTHER
        raise CallFailed(StatusCode.UNAVAILABLE, "the other is away")

    async with serving() as it, channel(it.address) as client:
        it.methods.by_path[OTHER] = Streaming(handle)
        with pytest.raises(CallFailed, match="UNAVAILABLE: the other is away"):
            await client.stream(OTHER).read()


async def test_a_fault_at_a_cancellation_ends_no_other_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All calls with one deadline end at it, and the connection goes on."""

    def fail() -> None:
        raise RuntimeError

    def handle(call: ServerCall, _message: bytes) -> None:
        call.on_cancel = fail

    async with serving() as it, channel(it.address) as client:
        it.methods.by_path[OTHER] = Unary(handle)
        await client.wait_ready(30)  # so that the calls arrive, however soon they end
        calls = [client.unary(OTHER, b"", timeout_s=0.03) for _ in range(3)]
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: len(caplog.records) == len(calls), "the faults in the log")
        assert await client.unary(ECHO, b"x") == b"x"


# --- frame by frame


async def connected(limits: Limits | None = None) -> Core:
    """A connection that has greeted."""
    core = Core(limits)
    core.feed(PREFACE + frames.settings_frame({}))
    return core


def kinds(data: bytes) -> list[int]:
    """The types of the frames."""
    return [each.kind for each in parsed(data)]


def without_end(data: bytes) -> list[bytes]:
    """The frames of a request, which does not end."""
    return [_encoded(each) for each in parsed(data)]


def _encoded(each: Frame) -> bytes:
    return frames.frame(each.kind, each.flags & ~END_STREAM, each.stream_id, each.payload)


@pytest.mark.parametrize("length", [b"9" * 5_000, b"1x", b""])
async def test_a_content_length_that_is_none_resets_the_stream(length: bytes) -> None:
    """Also when it has more digits than Python converts; other calls go on."""
    core = await connected()
    call = request(1, UNARY, b"x", (b"content-length", length))
    assert frames.RST_STREAM in kinds(core.feed(call))
    assert frames.DATA in kinds(core.feed(request(3, UNARY, b"x")))


async def test_requests_that_wait_for_their_end_are_bounded() -> None:
    """A complete message without the end of its stream counts as what is incomplete does."""
    core = await connected(Limits(received_bytes_max=10_000))
    calls = [b"".join(without_end(request(2 * n + 1, UNARY, b"x" * 1_000))) for n in range(6)]
    for call in calls[:4]:
        assert core.feed(call) == b""
    assert core.received.held == 4 * (HEAD_BYTES + 1_064)
    assert frames.RST_STREAM in kinds(core.feed(calls[4]))
    end = frames.data_header(0, END_STREAM, 1)
    assert frames.DATA in kinds(core.feed(end))
    core.feed(frames.reset_frame(3, frames.ErrorCode.CANCEL))
    assert core.received.held == 2 * (HEAD_BYTES + 1_064)
    await core.lose()
    assert core.received.held == 0


def lists_from_references(path: str) -> Iterator[bytes]:
    """Headers of 12 kB, none of which ends its stream or is like another, from 70 bytes each."""
    field = b"\x40\x03x-a\x7f\xbd\x1d" + b"v" * 3_900  # added to the dynamic table
    call = without_end(request(1, path, b""))[0][9:]
    yield frames.header_frames(call + field, 0, 1)
    for number in range(1, 256):
        block = call + literal(b"x-n", b"%d" % number) + b"\xbe" * 3
        yield frames.header_frames(block, 0, 2 * number + 1)


async def test_what_a_connection_keeps_of_headers_is_bounded() -> None:
    """Few bytes may refer to long entries of the dynamic table, again and again."""
    core = await connected()
    headers = lists_from_references("/e/Unknown")
    core.feed(next(headers))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for header in headers:
            core.feed(header)
        assert tracemalloc.get_traced_memory()[0] - before < 8 * KEPT_BYTES_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", [UNARY, SILENT])
async def test_headers_of_open_calls_are_bounded(path: str) -> None:
    """They count as messages that are not complete, until the calls end."""
    core = await connected(Limits(received_bytes_max=60_000))
    headers = lists_from_references(path)
    for _ in range(5):
        core.feed(next(headers))
    assert frames.RST_STREAM in kinds(core.feed(next(headers)))
    assert 50_000 < core.received.held <= 60_000
    core.feed(frames.reset_frame(1, frames.ErrorCode.CANCEL))
    assert core.received.held <= 60_000 - 5_000
    await core.lose()
    assert core.received.held == 0


async def test_what_follows_a_refused_stream_is_ignored() -> None:
    """Data and trailers that were on their way neither get an answer nor end the connection."""
    core = await connected(Limits(streams_max=1))
    head, _ = without_end(request(1, STREAM, b""))
    core.feed(head)
    head, data = without_end(request(3, STREAM, b"x"))
    assert kinds(core.feed(head)) == [frames.RST_STREAM]
    assert core.feed(data + data) == b""
    assert core.feed(frames.header_frames(literal(b"x", b"y"), END_STREAM, 3)) == b""
    await core.lose()


async def test_a_client_begins_with_its_settings() -> None:
    """Any other frame behind the preface, and an ACK alone, ends the connection."""
    for first in (frames.frame(frames.PING, 0, 0, bytes(8)), frames.window_update(0, 1)):
        assert frames.GOAWAY in kinds(Core().feed(PREFACE + first))
    ack = frames.frame(frames.SETTINGS, frames.ACK, 0)
    assert frames.GOAWAY in kinds(Core().feed(PREFACE + ack + request(1, UNARY, b"x")))
