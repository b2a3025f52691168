"""Our state machines talk to those of the `h2` package, which refuses whatever breaks HTTP/2.

Each attempt is a random conversation: windows of any size, padding, settings that change, resets,
and bytes that arrive in any pieces. In the end every call that was not reset has its answer.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.client_calls import StreamClientCall
from shalekv_wire.status import CallFailed, StatusCode
from tests.fuzz.budget import attempts, budgets, replayable
from tests.wire.core import LATE, STREAM, UNARY, Core, client_connection, run

BUDGET_S = 1.5
STEPS = 60
CALLS = 12
TURNS_MAX = 2_000  # of the end of a conversation, until all is answered
SIZES = (0, 1, 7, 100, 5_000, 16_384, 40_000, 200_000)  # of messages
WINDOWS = (0, 1, 50, 20_000, 65_535, 1 << 20)
TABLES = (0, 60, 4_096)
PREFIX = struct.Struct(">BI")
TEXT = "not found: ü %"


def framed(messages: list[bytes]) -> bytes:
    return b"".join(PREFIX.pack(0, len(each)) + each for each in messages)


def pieces(data: bytes, random: Random) -> Iterator[bytes]:
    """`data` cut at random places."""
    while data:
        size = random.choice((1, 3, 9, 100, 20_000, len(data)))
        yield data[:size]
        data = data[size:]


class Peer:
    """One side of a connection by `h2`: what it has received, and what it has yet to send."""

    def __init__(self, random: Random, *, is_client: bool) -> None:
        config = h2.config.H2Configuration(client_side=is_client, header_encoding="utf-8")
        self.pings_left = 3
        self.is_client = is_client  # a server ends its streams with trailers
        self.h2: Any = h2.connection.H2Connection(config)
        self.random = random
        self.unsent: dict[int, bytes] = {}  # of streams that are not ended
        self.data: dict[int, bytes] = defaultdict(bytes)
        self.heads: dict[int, list[dict[str, str]]] = defaultdict(list)
        self.ended: set[int] = set()
        self.reset: set[int] = set()  # by either side
        self._unacknowledged: dict[int, int] = defaultdict(int)
        self.h2.initiate_connection()

    def take(self, data: bytes) -> list[Any]:
        """Take what the other side sends."""
        events: list[Any] = []
        for piece in pieces(data, self.random):
            events += self.h2.receive_data(piece)
        for event in events:
            self._note(event)
        return events

    def _note(self, event: Any) -> None:
        match event:
            case h2.events.DataReceived():
                self.data[event.stream_id] += event.data
                self._unacknowledged[event.stream_id] += event.flow_controlled_length
            case (
                h2.events.ResponseReceived()
                | h2.events.TrailersReceived()
                | h2.events.RequestReceived()
            ):
                self.heads[event.stream_id].append({str(k): str(v) for k, v in event.headers})
            case h2.events.StreamEnded():
                self.ended.add(event.stream_id)
            case h2.events.StreamReset():
                self.reset.add(event.stream_id)
                self.unsent.pop(event.stream_id, None)
            case h2.events.ConnectionTerminated():
                raise AssertionError(f"the connection has ended: {event}")

    def send_some(self, stream_id: int) -> bool:
        """Send a part of what a stream has to send, or its end; False: the windows are shut."""
        unsent = self.unsent[stream_id]
        size = min(len(unsent), self.h2.local_flow_control_window(stream_id), 16_384)
        size = min(size, self.random.choice((1, 40, 16_384)))
        if not size and (unsent or not self.is_client):
            return False
        is_last = self.is_client and size == len(unsent)
        room = self.h2.local_flow_control_window(stream_id) - size - 1
        padding = self.random.randrange(200) if self.random.random() < 0.1 else None
        if padding is not None and (room < padding or size + padding + 1 > 16_384):
            padding = None
        self.h2.send_data(stream_id, unsent[:size], end_stream=is_last, pad_length=padding)
        self.unsent[stream_id] = unsent[size:]
        if is_last:
            del self.unsent[stream_id]
        return True

    def acknowledge(self, share: float) -> None:
        """Give back the windows of some streams."""
        for stream_id, size in [*self._unacknowledged.items()]:
            if size and self.random.random() < share:
                self.h2.acknowledge_received_data(size, stream_id)
                del self._unacknowledged[stream_id]

    def cancel(self, stream_id: int) -> None:
        self.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        self.reset.add(stream_id)
        self.unsent.pop(stream_id, None)

    def change_settings(self) -> None:
        self.h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: self.random.choice(WINDOWS),
                SettingCodes.HEADER_TABLE_SIZE: self.random.choice(TABLES),
            }
        )

    def open_windows(self) -> None:
        self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 22})
        self.h2.increment_flow_control_window(1 << 30)

    def step(self) -> None:
        """Do something at random that both a client and a server may do."""
        match self.random.randrange(6):
            case 0 | 1 if self.unsent:
                self.send_some(self.random.choice([*self.unsent]))
            case 2:
                self.acknowledge(0.5)
            case 3 if self.random.random() < 0.3:
                self.change_settings()
            case 4 if self.pings_left:
                self.pings_left -= 1  # more would be an abuse: the clock stands still
                self.h2.ping(self.random.randbytes(8))
            case 5 if self.unsent and self.random.random() < 0.2:
                self.cancel(self.random.choice([*self.unsent]))


class Calls:
    """Calls by `h2` to our server's state machine."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.core = Core()
        self.peer = Peer(random, is_client=True)
        self.messages: dict[int, list[bytes]] = {}

    async def converse(self) -> None:
        await self.exchange()
        for _ in range(self.random.randrange(STEPS)):
            match self.random.randrange(4):
                case 0 if len(self.messages) < CALLS:
                    self.begin()
                case 1 if self.core.late:
                    self.core.late.pop(self.random.randrange(len(self.core.late)))()
                case _:
                    self.peer.step()
            if self.random.random() < 0.6:
                await self.exchange()
        await self.finish()

    def begin(self) -> None:
        path = self.random.choice((UNARY, STREAM, LATE))
        count = self.random.randrange(4) if path == STREAM else 1
        sent = [self.random.randbytes(self.random.choice(SIZES)) for _ in range(count)]
        stream_id = self.peer.h2.get_next_available_stream_id()
        more = [(f"x-{self.random.randrange(3)}", "v" * self.random.randrange(100))]
        more += [("grpc-timeout", "1H")] if self.random.random() < 0.5 else []
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a")]
        fields += [("te", "trailers"), ("content-type", "application/grpc")]
        self.peer.h2.send_headers(stream_id, fields + more)
        self.messages[stream_id] = sent
        self.peer.unsent[stream_id] = framed(sent)

    async def exchange(self) -> bool:
        """Let both sides take what the other has sent; returns whether that was anything."""
        to_server = self.peer.h2.data_to_send()
        sent = b"".join(self.core.feed(piece) for piece in pieces(to_server, self.random))
        sent += await self.core.settled()
        self.peer.take(sent)
        return bool(to_server or sent)

    async def finish(self) -> None:
        """Open all windows, send all that is unsent, and check the answers."""
        self.peer.open_windows()
        for _ in range(TURNS_MAX):
            for stream_id in [*self.peer.unsent]:
                self.peer.send_some(stream_id)
            while self.core.late:
                self.core.late.pop()()
            self.peer.acknowledge(1.0)
            if not await self.exchange() and not self.peer.unsent and not self.core.late:
                break
        for stream_id in self.messages.keys() - self.peer.reset:
            header, trailers = self.peer.heads[stream_id][0], self.peer.heads[stream_id][-1]
            assert header[":status"] == "200"
            assert trailers["grpc-status"] == "0"  # the same block, where there are no messages
            assert self.peer.data[stream_id] == framed(self.messages[stream_id])
            assert stream_id in self.peer.ended
        assert not self.core.connection.streams
        assert self.core.received.held == self.core.unsent.held == 0
        await self.core.lose()


async def call_our_server(random: Random) -> None:
    await Calls(random).converse()


async def answer_our_client(random: Random) -> None:
    await Answers(random).converse()


@budgets
def test_our_server_and_a_client_of_h2(times: int) -> None:
    """Every call has its echo; nothing is held in the end."""
    for number, random in attempts("server and h2", times * BUDGET_S):
        with replayable(number):
            run(call_our_server, random)


class Answers:
    """Calls by our client's state machine to a server by `h2`, which echoes."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.channel = WireChannel("a:1", ChannelOptions())
        self.client, self.sender = client_connection(self.channel)
        self.peer = Peer(random, is_client=False)
        self.answered: set[int] = set()  # streams with a header of the response
        self.echoed: dict[int, int] = defaultdict(int)  # bytes of each stream
        self.cancelled: set[int] = set()

    async def converse(self) -> None:
        async with asyncio.TaskGroup() as calls:
            await self.exchange()
            for _ in range(self.random.randrange(STEPS)):
                if self.random.random() < 0.2 and self.client.can_open:
                    calls.create_task(self.call())
                    await asyncio.sleep(0)
                elif self.random.random() < 0.5:
                    self.peer.step()
                self.echo()
                if self.random.random() < 0.6:
                    await self.exchange()
            await self.finish()
        assert not self.client.streams
        assert self.channel.received.held == 0
        await self.channel.close()

    async def call(self) -> None:
        """Make one call, and check its echo."""
        count, is_failure = self.random.randrange(4), self.random.random() < 0.2
        sent = [self.random.randbytes(self.random.choice(SIZES)) for _ in range(count)]
        path = "/e/Fail" if is_failure else "/e/Echo"
        call = StreamClientCall(self.channel, path, metadata=(("x-a", "b"),), deadline_s=None)
        self.client.open(call)
        cancels = self.random.random() < 0.1
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self.write(call, sent))
                if cancels:
                    self.cancelled.add(call.id)
                    call.cancel()
                got = [each async for each in messages_of(call)]
            assert got == sent
            assert not is_failure
        except* CallFailed as failed:
            error = failed.exceptions[0]
            assert isinstance(error, CallFailed)
            if is_failure and error.code is StatusCode.NOT_FOUND:
                assert error.message == TEXT
            else:
                assert call.id in self.peer.reset | self.cancelled, error

    async def write(self, call: StreamClientCall, sent: list[bytes]) -> None:
        for each in sent:
            await call.write(each)
        await call.done_writing()

    def echo(self) -> None:
        """Let the server answer what it has received so far, and end what has ended."""
        for stream_id, heads in self.peer.heads.items():
            if stream_id in self.peer.reset or stream_id not in self.peer.ended:
                continue
            if stream_id not in self.answered:
                self.answered.add(stream_id)
                self.peer.h2.send_headers(
                    stream_id, [(":status", "200"), ("content-type", "application/grpc")]
                )
                self.peer.unsent[stream_id] = self.peer.data[stream_id]
            if self.peer.unsent.get(stream_id) == b"":
                del self.peer.unsent[stream_id]
                self._end(stream_id, is_failure=heads[0][":path"] == "/e/Fail")

    def _end(self, stream_id: int, *, is_failure: bool) -> None:
        status = [("grpc-status", "0")]
        if is_failure:
            status = [("grpc-status", "5"), ("grpc-message", "not found: %C3%BC %25")]
        self.peer.h2.send_headers(stream_id, status, end_stream=True)

    async def exchange(self) -> bool:
        to_client = self.peer.h2.data_to_send()
        for piece in pieces(to_client, self.random):
            self.sender.is_held = True
            self.client.receive(piece)
        sent = b""
        for _ in range(4):
            await asyncio.sleep(0)
            while data := self.sender.take():
                sent += data
        assert not self.client.is_over
        self.peer.take(sent)
        return bool(to_client or sent)

    async def finish(self) -> None:
        self.peer.open_windows()
        for _ in range(TURNS_MAX):
            self.echo()
            for stream_id in [*self.peer.unsent]:
                if self.peer.unsent[stream_id]:
                    self.peer.send_some(stream_id)
            self.echo()
            self.peer.acknowledge(1.0)
            if not await self.exchange() and not self.client.streams:
                break


async def messages_of(call: StreamClientCall) -> Any:
    while (message := await call.read()) is not None:
        yield message


@budgets
def test_our_client_and_a_server_of_h2(times: int) -> None:
    """Every call gets its echo or its status."""
    for number, random in attempts("client and h2", times * BUDGET_S):
        with replayable(number):
            run(answer_our_client, random)
