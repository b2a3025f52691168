"""The client of the wire over real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest

from shalekv_wire import frames
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.frames import ErrorCode
from shalekv_wire.headers import HeaderDecoder, literal, request_head
from shalekv_wire.server import ServerOptions
from shalekv_wire.status import CallFailed, StatusCode
from shalekv_wire.stream import Limits
from tests.kit.constants import set_constants
from tests.kit.timeouts import until
from tests.wire.serving import CHAT, ECHO, LATER, RawPeer, channel, raw_server, serving

GRPC = b"\x88" + literal(b"content-type", b"application/grpc")
OK = literal(b"grpc-status", b"0")


def reply(stream_id: int, message: bytes) -> bytes:
    """Header, message and trailers of a call that has succeeded."""
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return (
        frames.header_frames(GRPC, 0, stream_id)
        + frames.frame(frames.DATA, 0, stream_id, body)
        + frames.header_frames(OK, frames.END_STREAM, stream_id)
    )


async def greeted(peers: asyncio.Queue[RawPeer]) -> RawPeer:
    """Accept a connection and greet the client."""
    peer = await peers.get()
    preface = await peer.receive_exactly(len(frames.PREFACE))
    assert preface == frames.PREFACE
    peer.send(frames.settings_frame({}))
    return peer


async def failure(call: asyncio.Future[bytes]) -> CallFailed:
    """Return the error of a call."""
    with pytest.raises(CallFailed) as failed:
        await call
    return failed.value


async def test_calls_wait_for_a_server_that_speaks() -> None:
    """Nothing is sent to a port that accepts and says nothing: the call is certainly unsent."""
    options = ChannelOptions(connect_timeout_s=0.1)
    async with raw_server() as (address, peers), channel(address, options) as client:
        failed = await failure(client.unary(ECHO, b"x"))
        assert (failed.code, failed.is_unsent) == (StatusCode.UNAVAILABLE, True)
        sent = await (await peers.get()).receive_end()
        assert ECHO.encode() not in sent


async def test_a_refused_connection_fails_calls_at_once_until_the_backoff_ends() -> None:
    """Calls fail without another attempt; the next attempt finds the server that is back."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))  # and does not listen
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    async with channel(address, ChannelOptions(backoff_s=0.1, backoff_max_s=0.1)) as client:
        for _ in range(2):
            failed = await failure(client.unary(ECHO, b"x"))
            assert failed.is_unsent
            assert failed.message == "no connection to the server: Connection refused"
        with pytest.raises(CallFailed, match="no connection"):
            await client.wait_ready(5)
        sock.listen()
        async with serving(sock=sock, address=address):
            await client.wait_ready(5)
            assert await client.unary(ECHO, b"x") == b"x"


async def test_a_lost_connection_leaves_the_outcome_open_and_is_replaced() -> None:
    """Calls on a connection that breaks may have been processed; the next call connects again."""
    async with raw_server() as (address, peers), channel(address) as client:
        call = client.unary(ECHO, b"x")
        peer = await greeted(peers)
        await peer.receive(frames.DATA)
        peer.close()
        failed = await failure(call)
        assert (failed.code, failed.is_unsent) == (StatusCode.UNAVAILABLE, False)
        call = client.unary(ECHO, b"x")
        peer = await greeted(peers)
        await peer.receive(frames.DATA)
        peer.send(reply(1, b"y"))
        assert await call == b"y"


async def test_a_call_that_the_server_has_not_seen_begins_again() -> None:
    """After a GOAWAY, or a refused stream, a unary call is sent once more, and no third time."""
    async with raw_server() as (address, peers), channel(address) as client:
        seen, unseen = client.unary(ECHO, b"1"), client.unary(ECHO, b"2")
        peer = await greeted(peers)
        for _ in range(2):
            await peer.receive(frames.DATA)
        peer.send(frames.goaway_frame(1, ErrorCode.NO_ERROR))
        other = await greeted(peers)
        _, _, stream_id, _ = await other.receive(frames.DATA)
        other.send(frames.reset_frame(stream_id, ErrorCode.REFUSED_STREAM))
        failed = await failure(unseen)
        assert (failed.code, failed.is_unsent) == (StatusCode.UNAVAILABLE, True)
        peer.send(reply(1, b"one"))  # the old connection still answers what it has seen
        assert await seen == b"one"
        await peer.receive_end()  # and is closed by the client
        call = client.unary(ECHO, b"3")
        _, _, stream_id, _ = await other.receive(frames.DATA)
        other.send(frames.reset_frame(stream_id, ErrorCode.REFUSED_STREAM))
        _, _, stream_id, _ = await other.receive(frames.DATA)
        other.send(reply(stream_id, b"three"))
        assert await call == b"three"


async def test_a_cancelled_call_resets_its_stream() -> None:
    """Cancelling the caller, its future or its stream reaches the server; other calls go on."""
    async with raw_server() as (address, peers), channel(address) as client:
        future = client.unary(ECHO, b"1")
        peer = await greeted(peers)
        await peer.receive(frames.DATA)
        future.cancel()
        _, _, stream_id, _ = await peer.receive(frames.RST_STREAM)
        assert stream_id == 1
        caller = asyncio.create_task(_await(client.unary(ECHO, b"2")))
        await peer.receive(frames.DATA)
        caller.cancel()
        _, _, stream_id, _ = await peer.receive(frames.RST_STREAM)
        assert stream_id == 3
        chat = client.stream(CHAT)
        await chat.write(b"x")
        reading = asyncio.create_task(chat.read())
        await asyncio.sleep(0)
        chat.cancel()
        with pytest.raises(CallFailed, match="CANCELLED"):
            await reading
        with pytest.raises(CallFailed, match="CANCELLED"):
            await chat.write(b"x")
        peer.send(reply(1, b"late") + reply(3, b"late") + reply(5, b"late"))  # is ignored
        call = client.unary(ECHO, b"4")
        await peer.receive(frames.DATA)
        await peer.receive(frames.DATA)
        peer.send(reply(7, b"four"))
        assert await call == b"four"


async def _await(future: asyncio.Future[bytes]) -> bytes:
    return await future


async def test_calls_beyond_the_limit_of_the_server_wait_for_others() -> None:
    """A server that takes two calls at once gets two; the third is sent when one has ended."""
    options = ServerOptions(limits=Limits(streams_max=2))
    async with serving(options) as it, channel(it.address) as client:
        calls = [client.unary(LATER, b"") for _ in range(4)]
        await until(lambda: len(it.methods.later) == 2, "two calls")
        assert await asyncio.wait(calls, timeout=0.05) == (set(), set(calls))
        calls[2].cancel()  # it is forgotten without a stream
        it.methods.later[0].reply(b"first")
        await until(lambda: len(it.methods.later) == 3, "a third call")
        for call in it.methods.later[1:]:
            call.reply(b"more")
        assert await calls[0] == b"first"
        assert [await calls[1], await calls[3]] == [b"more", b"more"]


async def test_a_deadline_ends_a_call_wherever_it_is() -> None:
    """Waiting for a connection it is unsent; at a server that does not answer it may be applied."""
    async with raw_server() as (address, peers), channel(address) as client:
        failed = await failure(client.unary(ECHO, b"x", timeout_s=0.05))
        assert (failed.code, failed.is_unsent) == (StatusCode.DEADLINE_EXCEEDED, True)
        peer = await greeted(peers)
        await client.wait_ready(5)
        failed = await failure(client.unary(ECHO, b"x", timeout_s=0.05))
        assert (failed.code, failed.is_unsent) == (StatusCode.DEADLINE_EXCEEDED, False)
        await peer.receive(frames.RST_STREAM)


async def test_a_server_may_notice_a_deadline_first() -> None:
    """A server resets a call when its deadline has passed: that is no cancelled call."""
    async with raw_server() as (address, peers), channel(address) as client:
        ready = asyncio.create_task(client.wait_ready(30))
        peer = await greeted(peers)
        await ready
        call = client.unary(ECHO, b"x", timeout_s=0.05)
        loop = asyncio.get_running_loop()
        late_s = loop.time() + 0.05  # the deadline has passed, and the client may not know yet
        _, _, stream_id, _ = await peer.receive(frames.HEADERS)
        loop.call_at(late_s, peer.send, frames.reset_frame(stream_id, ErrorCode.CANCEL))
        assert (await failure(call)).code is StatusCode.DEADLINE_EXCEEDED


async def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection with calls and without a sign of life is closed, and the call fails."""
    set_constants(monkeypatch, {"shalekv_wire.client:CHECK_INTERVAL_S": 0.1})
    options = ChannelOptions(keepalive_s=0.1, keepalive_timeout_s=0.1)
    async with raw_server() as (address, peers), channel(address, options) as client:
        call = client.unary(ECHO, b"x")
        peer = await greeted(peers)
        await peer.receive(frames.PING)
        failed = await failure(call)
        assert (failed.code, failed.is_unsent) == (StatusCode.UNAVAILABLE, False)
        assert "silent" in failed.message


@pytest.mark.parametrize(
    ("response", "code", "text"),
    [
        (frames.header_frames(b"\x48\x03503", 5, 1), StatusCode.UNAVAILABLE, "HTTP status 503"),
        (frames.header_frames(b"\x8d", 5, 1), StatusCode.UNIMPLEMENTED, "HTTP status 404"),
        (frames.header_frames(GRPC, 5, 1), StatusCode.UNKNOWN, "no grpc-status"),
        (frames.header_frames(GRPC + OK, 5, 1), StatusCode.INTERNAL, "OK without a reply"),
        (frames.header_frames(GRPC + literal(b"grpc-status", b"77"), 5, 1), StatusCode.UNKNOWN, ""),
        (frames.header_frames(b"\xff", 4, 1), StatusCode.INTERNAL, "cut off"),
        (frames.reset_frame(1, ErrorCode.CANCEL), StatusCode.CANCELLED, "reset"),
        (frames.frame(frames.DATA, 1, 1, b"\0\0\0\0\x09x"), StatusCode.INTERNAL, ""),
    ],
    ids=["503", "404", "no-status", "no-reply", "odd-status", "garbage", "reset", "cut-off"],
)
async def test_answers_that_are_none_fail_the_call(
    response: bytes, code: StatusCode, text: str
) -> None:
    """An answer that is none of gRPC gives the error that the protocol maps it to."""
    async with raw_server() as (address, peers), channel(address) as client:
        call = client.unary(ECHO, b"x")
        peer = await greeted(peers)
        await peer.receive(frames.DATA)
        peer.send(response)
        failed = await failure(call)
        assert failed.code is code
        assert text in failed.message


async def test_a_closed_channel_refuses_calls() -> None:
    """Calls under way and later ones end with CANCELLED."""
    async with serving() as it:
        client = WireChannel(it.address)
        call, chat = client.unary(LATER, b""), client.stream(CHAT)
        await until(lambda: it.methods.later, "a call")
        await client.close()
        assert (await failure(call)).code is StatusCode.CANCELLED
        with pytest.raises(CallFailed, match="CANCELLED"):
            await chat.read()
        assert (await failure(client.unary(ECHO, b""))).code is StatusCode.CANCELLED
        with pytest.raises(CallFailed, match="CANCELLED"):
            await client.wait_ready(1)


async def test_calls_of_a_closed_channel_need_not_be_awaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """None of them is reported as an error that nobody has seen."""
    gc.collect()  # what earlier tests have left is reported now
    caplog.clear()
    async with serving() as it:
        client = WireChannel(it.address)
        under_way = client.unary(LATER, b"")
        await until(lambda: it.methods.later, "a call")
        await client.close()
        late = client.unary(ECHO, b"")
        assert under_way.done()
        assert late.done()
        del under_way, late
        gc.collect()
    assert not caplog.records


async def test_a_reset_by_the_server_gives_its_place_to_a_call_that_waits() -> None:
    """With one stream at a time, the second call is sent when the server has reset the first."""
    async with raw_server() as (address, peers), channel(address) as client:
        first, second = client.unary(ECHO, b"1"), client.unary(ECHO, b"2")
        peer = await peers.get()
        peer.send(frames.settings_frame({frames.MAX_CONCURRENT_STREAMS: 1}))
        await peer.receive_exactly(len(frames.PREFACE))
        await peer.receive(frames.DATA)
        peer.send(frames.reset_frame(1, ErrorCode.CANCEL))
        assert (await failure(first)).code is StatusCode.CANCELLED
        _, _, stream_id, _ = await peer.receive(frames.DATA)
        peer.send(reply(stream_id, b"two"))
        assert await second == b"two"


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.frame(frames.PING, 0, 0, b"12345678"),
        frames.frame(frames.SETTINGS, frames.ACK, 0) + frames.window_update(0, 1),
    ],
    ids=["http1", "ping", "ack"],
)
async def test_what_is_not_http2_is_no_server(greeting: bytes) -> None:
    """Settings come first (RFC 9113, 3.4); the error says what is wrong with the port."""
    async with raw_server() as (address, peers), channel(address) as client:
        call = client.unary(ECHO, b"x")
        (await peers.get()).send(greeting)
        failed = await failure(call)
        assert (failed.code, failed.is_unsent) == (StatusCode.UNAVAILABLE, True)
        assert failed.message.startswith("no connection to the server: this is not HTTP/2")


@pytest.mark.parametrize("stream_id", [2, 5])
async def test_a_response_to_no_request_ends_the_connection(stream_id: int) -> None:
    """A server opens no streams (RFC 9113, 5.1.1); that of a call that was cancelled is ignored."""
    async with raw_server() as (address, peers), channel(address) as client:
        client.unary(ECHO, b"x").cancel()
        call = client.unary(ECHO, b"x")
        peer = await greeted(peers)
        await peer.receive(frames.DATA)
        peer.send(reply(stream_id, b"y"))
        failed = await failure(call)
        assert (failed.code, failed.is_unsent) == (StatusCode.INTERNAL, False)
        assert "a response to no request" in failed.message


async def test_a_server_that_offers_to_push_breaks_the_protocol() -> None:
    """A client takes ENABLE_PUSH of 1 from no server (RFC 9113, 6.5.2)."""
    async with raw_server() as (address, peers), channel(address) as client:
        call = client.unary(ECHO, b"x")
        (await peers.get()).send(frames.settings_frame({frames.ENABLE_PUSH: 1}))
        assert (await failure(call)).message.endswith("ENABLE_PUSH of 1")


async def test_a_server_that_takes_no_calls_counts_as_none() -> None:
    """A server that says goodbye with its greeting is not asked again until the backoff ends."""
    never = ChannelOptions(backoff_s=1_000)
    async with raw_server() as (address, peers), channel(address, never) as client:
        call = client.unary(ECHO, b"x")
        goodbye = frames.goaway_frame(0, ErrorCode.NO_ERROR)
        (await peers.get()).send(frames.settings_frame({}) + goodbye)
        failed = await failure(call)
        assert (failed.is_unsent, failed.code) == (True, StatusCode.UNAVAILABLE)
        assert "takes no calls" in (await failure(client.unary(ECHO, b"x"))).message
        assert peers.empty()


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:x", "127.0.0.1:99999", "a..b:1", "例:1"]
)
async def test_an_address_that_is_none_fails_calls(address: str) -> None:
    """Calls do not wait for a connection that cannot be."""
    async with channel(address) as client:
        for _ in range(2):
            assert (await failure(client.unary(ECHO, b"x"))).is_unsent


async def test_a_channel_that_is_closed_is_not_ready() -> None:
    """Who waits for the connection is told, and is not cancelled."""
    async with raw_server() as (address, peers):
        client = WireChannel(address)
        waiting = asyncio.create_task(client.wait_ready(5))
        await peers.get()
        await client.close()
        with pytest.raises(CallFailed, match="the channel was closed"):
            await waiting


@pytest.mark.parametrize("item", [("token", "x\n"), ("Token", "x"), ("token", "a\r\nb"), ("", "x")])
async def test_metadata_that_cannot_be_sent_is_refused(item: tuple[str, str]) -> None:
    """It is an error of the caller, and the server sees nothing of it."""
    async with serving() as it, channel(it.address) as client:
        with pytest.raises(ValueError, match="cannot be sent"):
            await client.unary(ECHO, b"x", metadata=[item])
        assert await client.unary(ECHO, b"x") == b"x"


async def test_a_call_that_is_over_is_not_kept() -> None:
    """No cycle of references keeps request and reply until the next garbage collection."""
    async with serving() as it, channel(it.address) as client:
        gc.disable()
        try:
            call = client.unary(ECHO, b"x")
            await call
            kept = weakref.ref(call)
            del call
            await asyncio.sleep(0)  # the loop forgets what has woken this task
            assert kept() is None
        finally:
            gc.enable()


async def test_a_stream_whose_last_message_is_cut_off_has_failed() -> None:
    """The status OK does not make up for the part of a message that is missing."""
    async with raw_server() as (address, peers), channel(address) as client:
        call = client.stream(CHAT)
        peer = await greeted(peers)
        await peer.receive(frames.HEADERS)
        cut_off = frames.frame(frames.DATA, 0, 1, b"\0\0\0\0\x09x")
        end = frames.header_frames(OK, frames.END_STREAM, 1)
        peer.send(frames.header_frames(GRPC, 0, 1) + cut_off + end)
        with pytest.raises(CallFailed, match="INTERNAL: the last message is cut off"):
            await call.read()


async def test_metadata_of_a_channel_goes_with_every_call() -> None:
    """It is encoded once for each connection, and also when the table of fields is full."""
    fits, beyond = "f" * 64, "b" * 4_096
    decoder = HeaderDecoder(request_head, list_bytes_max=16_384)
    async with raw_server() as (address, peers), channel(address) as client:
        sizes: dict[str, list[int]] = {}

        connecting = asyncio.create_task(client.wait_ready(10))
        peer = await greeted(peers)
        await connecting
        for value in ("first", fits, beyond, fits):
            client.set_metadata([("authorization", value)])
            for _ in range(2):
                call = asyncio.ensure_future(client.unary(ECHO, b"x", metadata=[("own", "1")]))
                _, _, _, block = await peer.receive(frames.HEADERS)
                own = (("authorization", value), ("own", "1"))
                assert tuple(decoder.decode(block).metadata)[-2:] == own
                sizes.setdefault(value, []).append(len(block))
                call.cancel()
    assert sizes["first"][1] == sizes[fits][1] == sizes[fits][2] == sizes[fits][3]
    assert sizes[beyond] == [len(beyond) + sizes["first"][1] + 17] * 2


async def test_metadata_that_changes_while_a_channel_connects_is_that_of_its_calls() -> None:
    """A connection that was begun with an access token is not left with it."""
    decoder = HeaderDecoder(request_head, list_bytes_max=16_384)
    async with raw_server() as (address, peers), channel(address) as client:
        client.set_metadata([("authorization", "before")])
        call = asyncio.ensure_future(client.unary(ECHO, b"x"))
        await asyncio.sleep(0)  # it connects
        client.set_metadata([("authorization", "after")])
        _, _, _, block = await (await greeted(peers)).receive(frames.HEADERS)
        assert tuple(decoder.decode(block).metadata)[-1] == ("authorization", "after")
        call.cancel()


async def test_metadata_over_the_limit_of_the_server_is_not_sent() -> None:
    """The call fails by itself, and says why; others go on, on the same connection."""
    long: list[tuple[str, str | bytes]] = [("k", "x" * 300), ("b-bin", bytes(100))]
    async with raw_server() as (address, peers), channel(address) as client:
        first = asyncio.ensure_future(client.unary(ECHO, b"x"))
        peer = await peers.get()
        await peer.receive_exactly(len(frames.PREFACE))
        peer.send(frames.settings_frame({frames.MAX_HEADER_LIST_SIZE: 700}))
        await peer.receive(frames.DATA)
        peer.send(reply(1, b"1"))
        assert await first == b"1"
        failed = await failure(client.unary(ECHO, b"x", metadata=long))
        assert (failed.code, failed.is_unsent) == (StatusCode.RESOURCE_EXHAUSTED, True)
        assert "the server takes 700" in failed.message
        last = asyncio.ensure_future(client.unary(ECHO, b"x", metadata=long[1:]))
        await peer.receive(frames.DATA)
        peer.send(reply(3, b"3"))  # the next stream
        assert await last == b"3"
