"""A server that is full: strangers without calls give way, and whoever is served stays."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path

import pytest

from shalekv.settings import LogLevel
from shalekv.v1 import kv_pb2
from shalekv_wire import frames
from shalekv_wire.headers import literal
from shalekv_wire.server import ServerOptions, StreamCall, Streaming, Unary, _network_of
from shalekv_wire.status import CallFailed, StatusCode
from shalekv_wire.tls import TlsContexts
from tests.kit.constants import constants
from tests.kit.serving.rpc import serving as database
from tests.kit.timeouts import until
from tests.wire.serving import (
    CHAT,
    ECHO,
    LATER,
    RawPeer,
    Serving,
    channel,
    raw_client,
    request,
    serving,
)
from tests.wire.test_tls import HALF_HELLO, client, server_files

MOST = 20
# At a connection that is not closed. The server has its turns in each of them, also when the
# machine stands still for longer.
LOOKS, LOOK_S = 10, 0.02
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
OPEN, ASK = "/test.Test/Open", "/test.Test/Ask"  # a stream and a call, open to everybody
HEAR = "/test.Test/Hear"  # a stream that admits nobody
DENY = "/test.Test/Deny"  # a stream that has ended with an error after its first message
GREETING = frames.PREFACE + frames.settings_frame({})
HEAR_CALL = request(1, HEAR, b"")
NO_WINDOW = frames.PREFACE + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0})
GET = b"\x82\x86\x84" + literal(b":authority", b"test")
STRANGERS = {
    "silent": b"",
    "half a preface": frames.PREFACE[:10],
    "no settings": frames.PREFACE,
    "idle": GREETING,
    "pinging": GREETING + frames.frame(frames.PING, 0, 0, b"12345678"),
    "half a request": GREETING + request(1, ECHO, b"x" * 50)[:-20],
    "a header alone": GREETING + HEAR_CALL[: HEAR_CALL.index(b"\0" * 5) - 9],
    "a stream that was not admitted": GREETING + request(1, HEAR, b"x"),
    "a method of nobody": GREETING + request(1, "/test.Test/None", b""),
    "a stream that was ended": NO_WINDOW + request(1, DENY, b"x"),  # and the client reads nothing
    "an open stream": GREETING + request(1, OPEN, b"x"),
    "an open call": NO_WINDOW + request(1, ASK, b"x"),  # whose reply is not taken
    "a browser": NO_WINDOW + frames.header_frames(GET, frames.END_STREAM, 1),
}


@pytest.fixture(autouse=True)
def every_line() -> Iterator[None]:
    """Log each connection that gives way."""
    with constants({"shalekv_wire.server:SUMMARY_INTERVAL_S": 0}):
        yield


@asynccontextmanager
async def full(
    said: bytes, most: int = MOST, options: ServerOptions | None = None
) -> AsyncIterator[tuple[Serving, list[RawPeer]]]:
    """A server whose `most` places all have strangers, which have said this; the first is first."""
    options = options or ServerOptions(connections_max=most)
    async with serving(options) as it, AsyncExitStack() as stack:
        it.methods.by_path[OPEN] = Streaming(it.methods.chat, keeps_place=False)
        it.methods.by_path[ASK] = Unary(it.methods.echo, keeps_place=False)
        it.methods.by_path[HEAR] = Streaming(it.methods.hear)
        it.methods.by_path[DENY] = Streaming(denied)
        peers = []
        for _ in range(most):
            peers.append(await stack.enter_async_context(raw_client(it.address, greets=False)))
            peers[-1].send(said)
        await until(lambda: len(it.server.connections) == most, "all strangers")
        yield it, peers


async def denied(call: StreamCall) -> None:
    """A stream whose caller has lost its rights."""
    call.is_admitted = True
    call.send(b"x")
    raise CallFailed(StatusCode.PERMISSION_DENIED, "the rights were withdrawn")


async def is_closed(peer: RawPeer) -> bool:
    """Return whether the server has closed a connection, or does so in a moment."""
    ending = asyncio.ensure_future(peer.receive_end())
    for _ in range(LOOKS):
        await asyncio.wait([ending], timeout=LOOK_S)
        if ending.done():
            with suppress(ConnectionResetError):
                await ending
            return True
    ending.cancel()
    await asyncio.wait([ending])
    return False


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
async def test_strangers_keep_nobody_out(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """However strangers fill all places, new clients are served, and calls in progress go on."""
    async with AsyncExitStack() as stack:
        it, _ = await stack.enter_async_context(full(said))
        working = [await stack.enter_async_context(channel(it.address)) for _ in range(2)]
        reply, chat = working[0].unary(LATER, b""), working[1].stream(CHAT)
        await chat.write(b"first")
        assert await chat.read() == b"first"
        await until(lambda: it.methods.later, "the call")
        for _ in range(2 * MOST):
            newcomer = await stack.enter_async_context(channel(it.address))
            assert await newcomer.unary(ECHO, b"x") == b"x"
            assert len(it.server.connections) <= MOST + 1  # one of them is being closed
        it.methods.later[0].reply(b"answer")
        assert await reply == b"answer"
        await chat.write(b"second")
        assert await chat.read() == b"second"
    line = "20 connections are open, the most there may be: an idle one was closed for another"
    assert sum(line in each for each in caplog.messages) >= MOST
    assert not any("none is idle" in each for each in caplog.messages)


async def test_half_handshakes_keep_nobody_out(tmp_path: Path) -> None:
    """The same for strangers that begin a handshake of TLS, and go no further."""
    tls = TlsContexts(server_files(tmp_path), is_server=True)
    options = ServerOptions(connections_max=MOST, tls=tls)
    async with full(HALF_HELLO, options=options) as (it, peers):
        how = client(tmp_path)
        async with channel(it.address, how) as first, channel(it.address, how) as second:
            reply = first.unary(LATER, b"")
            await until(lambda: it.methods.later, "the call")
            assert await second.unary(ECHO, b"x") == b"x"
            it.methods.later[0].reply(b"answer")
            assert await reply == b"answer"
        assert [await is_closed(each) for each in peers[:3]] == [True, True, False]


async def test_the_one_that_is_idle_longest_leaves_in_good_order() -> None:
    """It is told that all its calls were answered, and closed; the others notice nothing."""
    async with full(GREETING, 3) as (it, peers), channel(it.address) as newcomer:
        assert await newcomer.unary(ECHO, b"x") == b"x"
        *_, goaway = await peers[0].receive(frames.GOAWAY)
        assert frames.parse_goaway(goaway)[:2] == (0, frames.ErrorCode.NO_ERROR)
        assert await peers[0].receive_end() == b""
        assert [await is_closed(each) for each in peers[1:]] == [False, False]


async def test_a_call_makes_its_connection_the_last_to_leave() -> None:
    """A connection is idle since its last call, and pings are none."""
    with constants({"shalekv_wire.server:CHECK_INTERVAL_S": 0.05}):
        async with full(GREETING + request(1, ECHO, b"x"), 2) as (it, peers):

            def seen() -> list[int]:  # the last call of each, at the last look
                return sorted(each._last_stream_id for each in it.server.connections)  # noqa: SLF001

            await until(lambda: seen() == [1, 1], "a look at the first calls")
            peers[0].send(request(3, ECHO, b"x"))
            await until(lambda: seen() == [1, 3], "a look at the second call")
            peers[1].send(frames.frame(frames.PING, 0, 0, b"12345678"))
            await peers[1].receive(frames.PING)
            async with channel(it.address) as newcomer:
                assert await newcomer.unary(ECHO, b"x") == b"x"
                assert [await is_closed(each) for each in peers] == [False, True]


async def test_a_connection_is_closed_only_if_none_is_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Calls in progress keep their connections, until one of them has ended."""
    with constants({"shalekv_wire.server:CHOICE_S": 0}):
        await _fill_with_calls()
    assert "2 connections are open, and none is idle: another one was closed at once" in caplog.text


async def _fill_with_calls() -> None:
    async with full(GREETING + request(1, LATER, b""), 2) as (it, peers):
        async with channel(it.address) as late:
            with pytest.raises(CallFailed) as failed:
                await late.unary(ECHO, b"x")
            assert failed.value.is_unsent
        it.methods.later[0].reply(b"answer")
        async with channel(it.address) as late:
            assert await late.unary(ECHO, b"x") == b"x"
        assert await is_closed(peers[0])
        it.methods.later[1].reply(b"answer")
        *_, answer = await peers[1].receive(frames.DATA)
        assert answer.endswith(b"answer")


@pytest.mark.parametrize("busy", [2, 1])
async def test_connections_are_not_looked_at_again_for_each_newcomer(busy: int) -> None:
    """If all idle ones are chosen, or there is none, newcomers alone are added until the next look.

    One that is idle since then leaves after it.
    """
    never = {"CHOICE_S": 1_000, "CHECK_INTERVAL_S": 1_000}
    with constants({f"shalekv_wire.server:{name}": it for name, it in never.items()}):
        async with full(GREETING, 2) as (it, peers), AsyncExitStack() as stack:
            for count, each in enumerate(peers[:busy], 1):
                each.send(request(1, LATER, b""))
                await until(lambda count=count: len(it.methods.later) == count, "a call")  # type: ignore[misc]
            first = await stack.enter_async_context(raw_client(it.address))
            assert await is_closed(first) == (busy == 2)
            it.methods.later[0].reply(b"answer")
            await peers[0].receive(frames.DATA)
            second = await stack.enter_async_context(raw_client(it.address))
            assert await is_closed(second) == (busy == 2)
            assert await is_closed(first)
            assert [await is_closed(each) for each in peers] == [False, busy == 1]
            it.server.connections.forget_choice()
            await visited(stack, it.address, "127.0.0.1")
            assert await is_closed(peers[0])


async def test_those_that_read_nothing_do_not_linger() -> None:
    """One that leaves has time to take what waits for it, but not if too many do not take it."""
    options = ServerOptions(connections_max=MOST)
    async with serving(options) as it, AsyncExitStack() as stack:
        it.methods.by_path[OPEN] = Streaming(it.methods.flood, keeps_place=False)
        no_flow_control = frames.settings_frame({frames.INITIAL_WINDOW_SIZE: frames.WINDOW_MAX})
        wide = frames.window_update(0, frames.WINDOW_MAX - frames.DEFAULT_WINDOW)
        files, strangers = open_files(), []
        for count in range(1, 3 * MOST):
            stranger = stack.enter_context(unread(it.address))
            strangers.append(stranger)
            stranger.sendall(frames.PREFACE + no_flow_control + wide + request(1, OPEN, b"x"))
            flooded = it.methods.flooded
            await until(lambda seen=flooded: it.methods.flooded > seen + 1, "the flood")  # type: ignore[misc]
            for _ in range(10):  # it is accepted by now; the one that was aborted is gone soon
                await asyncio.sleep(0)
            assert open_files() - files - count <= MOST + 1
        assert len(it.server.connections) <= MOST + 1


@contextmanager
def unread(address: str) -> Iterator[socket.socket]:
    """A connection whose replies nobody reads, and for which the system keeps few of them."""
    host, _, port = address.rpartition(":")
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((host, int(port)))
        yield made


def open_files() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_those_that_were_never_served_leave_first() -> None:
    """A client that is idle for longer stays, if it has had a reply and they have not."""
    with constants({"shalekv_wire.server:FIRST_REPLY_S": 0}):
        async with serving(ServerOptions(connections_max=3)) as it, AsyncExitStack() as stack:
            served = await stack.enter_async_context(raw_client(it.address))
            served.send(request(1, ECHO, b"x"))
            await served.receive(frames.DATA)
            strangers = [await stack.enter_async_context(raw_client(it.address)) for _ in range(2)]
            strangers[0].send(request(1, "/test.Test/None", b""))
            await strangers[0].receive(frames.HEADERS)  # an error is no message
            newcomer = await stack.enter_async_context(channel(it.address))
            assert await newcomer.unary(ECHO, b"x") == b"x"
            assert [await is_closed(each) for each in (*strangers, served)] == [True, False, False]


@pytest.mark.parametrize(("path", "look_s"), [(LATER, 1_000), (ECHO, 0.05)])
async def test_those_that_were_chosen_to_leave_stay_if_they_have_calls(
    path: str, look_s: float
) -> None:
    """A call in progress keeps the place at once, and one that was answered after the next look."""
    chosen_at_once = {"LEAVING_PART": 1, "FIRST_REPLY_S": 0, "CHECK_INTERVAL_S": look_s}
    with constants({f"shalekv_wire.server:{name}": it for name, it in chosen_at_once.items()}):
        async with full(GREETING, 3) as (it, peers), AsyncExitStack() as stack:
            await visited(stack, it.address, "127.0.0.1")
            peers[1].send(request(1, path, b"x"))
            if path == ECHO:
                await peers[1].receive(frames.DATA)
                await until(lambda: not it.server.connections.leaving, "a look")
            else:
                await until(lambda: it.methods.later, "the call")
            await visited(stack, it.address, "127.0.0.1")
            assert [await is_closed(each) for each in peers] == [True, False, True]


async def test_a_slow_newcomer_has_time_in_a_flood() -> None:
    """One that has just come leaves after all that were served and are idle, however short, and
    after those that came before it, also if these are of as many networks.
    """
    async with AsyncExitStack() as stack:
        it = await stack.enter_async_context(patient_server(stack))
        visit = partial(visited, stack, it.address)
        served = [await visit(f"127.0.1.{number}") for number in range(MOST)]
        for each in served:
            each.send(GREETING + request(1, ECHO, b"x"))
            await each.receive(frames.DATA)
        await visit("127.0.3.1")
        slow = await visit("127.0.0.1")
        await visit("127.0.0.1")
        for each in served:
            each.send(request(3, ECHO, b"x"))
            with suppress(asyncio.IncompleteReadError):  # three have left
                await each.receive(frames.DATA)
        for number in range(MOST - 2):
            await visit(f"127.0.2.{number}")
        slow.send(GREETING + request(1, ECHO, b"x"))
        await slow.receive(frames.DATA)


async def test_a_flood_of_one_network_takes_its_own_places() -> None:
    """Connections that others have had for longer are not touched."""
    async with AsyncExitStack() as stack:
        it = await stack.enter_async_context(patient_server(stack))
        visit = partial(visited, stack, it.address)
        others = [await visit("127.0.0.1"), await visit("127.0.0.2")]
        for _ in range(3 * MOST):
            await visit("127.0.0.3")
        await until(lambda: len(it.server.connections) == MOST, "the end of the others")
        assert [await is_closed(each) for each in others] == [False, False]


@pytest.mark.parametrize("level", [LogLevel.INFO, LogLevel.DEBUG])
async def test_calls_that_are_open_to_everybody_keep_nobody_out(level: LogLevel) -> None:
    """Watches of the health, and conversations with reflection, end for those who have calls."""
    with constants({"shalekv.rpc.native_server:CONNECTIONS_MAX": MOST}):
        async with AsyncExitStack() as stack:
            it = await stack.enter_async_context(database(wire="native", log_level=level))
            for path in [HEALTH_WATCH, REFLECTION] * MOST:
                stranger = await stack.enter_async_context(channel(it.server.listen))
                stream = stranger.stream(path)
                await stream.write(b"")
                assert await stream.read() is not None
            assert not (await it.kv.Get(kv_pb2.GetRequest(key=b"a"))).found


def patient_server(stack: AsyncExitStack) -> AbstractAsyncContextManager[Serving]:
    """A server to which all have just come, and which waits for what they say, however long a test
    takes; until the end of `stack`.
    """
    stack.enter_context(constants({"shalekv_wire.server:FIRST_REPLY_S": 1_000}))
    return serving(ServerOptions(connections_max=MOST, handshake_timeout_s=1_000))


async def visited(stack: AsyncExitStack, address: str, source: str) -> RawPeer:
    """A connection from `source`, that the server has accepted."""
    peer = await stack.enter_async_context(raw_client(address, greets=False, source=source))
    await peer.receive(frames.SETTINGS)
    return peer


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        (("10.1.2.3", 5), bytes([10, 1, 2, 3])),
        (("::ffff:10.1.2.3", 5, 0, 0), bytes([10, 1, 2, 3])),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), bytes.fromhex("20010db800010002")),
        (("fe80::1%eth0", 5, 0, 2), bytes.fromhex("fe80000000000000")),
        ("", b""),
    ],
)
def test_networks(peer: object, network: bytes) -> None:
    """An IPv4 address counts as a network also when a socket of IPv6 has accepted it."""

    class Connected(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return {"peername": peer}.get(name, default)

    assert _network_of(Connected()) == network


async def test_a_flood_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The next line says how many there were since."""
    async with full(b"", 2) as (it, _), AsyncExitStack() as stack:
        await visited(stack, it.address, "127.0.0.1")
        with constants({"shalekv_wire.server:SUMMARY_INTERVAL_S": 1_000}):
            for _ in range(10):
                await visited(stack, it.address, "127.0.0.1")
        await visited(stack, it.address, "127.0.0.1")
    lines = [each for each in caplog.messages if "an idle one was closed" in each]
    assert len(lines) == 2
    assert "(11 since the last such line)" in lines[1]
