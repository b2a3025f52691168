"""Bytes of no client: our state machines end them in an error of the protocol, and hold little.

There are three kinds: random bytes, conversations of a real client with changes, and frames of
random contents. A failure prints how to repeat it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import h2.config
import h2.connection
import h2.exceptions
import pytest

from shalekv_wire import frames
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.client_calls import StreamClientCall
from shalekv_wire.status import CallFailed
from shalekv_wire.stream import Limits
from tests.fuzz.budget import attempts, budgets, replayable
from tests.fuzz.mutations import mutant
from tests.wire.core import LATE, SILENT, STREAM, UNARY, Core, Frame, client_connection, parsed, run

BUDGET_S = 1.0
PATHS = (UNARY, STREAM, LATE, SILENT, "/e/Unknown")
LIMITS = Limits(
    message_bytes_max=2_000, metadata_bytes_max=2_000, streams_max=8, received_bytes_max=20_000
)
# What one byte of a client may make the server send at most, and what is sent without any.
SENT_PER_BYTE, SENT_BYTES_MIN = 60, 1_000
PIECES = (1, 2, 9, 10, 1_000)


def client_bytes(random: Random) -> bytes:
    """The bytes of a well-behaved client: calls, messages, resets, settings, pings."""
    peer: Any = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    peer.initiate_connection()
    open_streams: list[int] = []
    for _ in range(random.randrange(12)):
        match random.randrange(6):
            case 0 | 1 | 2:
                stream_id = peer.get_next_available_stream_id()
                peer.send_headers(stream_id, request_fields(random))
                open_streams.append(stream_id)
            case 3 if open_streams:
                message = random.randbytes(random.randrange(50))
                data = b"\0" + len(message).to_bytes(4, "big") + message
                peer.send_data(random.choice(open_streams), data * random.randrange(1, 3))
            case 4 if open_streams:
                stream_id = open_streams.pop(random.randrange(len(open_streams)))
                if random.random() < 0.7:
                    peer.end_stream(stream_id)
                else:
                    peer.reset_stream(stream_id)
            case 5:
                peer.update_settings({random.choice((1, 3, 4)): random.choice((0, 1, 20_000))})
            case _:
                peer.ping(random.randbytes(8))
    sent: bytes = peer.data_to_send()
    return sent


def request_fields(random: Random) -> list[tuple[str, str]]:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", random.choice(PATHS))]
    fields += [(":authority", "a"), ("te", "trailers"), ("content-type", "application/grpc")]
    more = [("grpc-encoding", "gzip"), ("grpc-timeout", "1H"), ("x-a-bin", "AAAA"), ("x-b", "c")]
    return fields + random.sample(more, random.randrange(3))


def random_frame(random: Random) -> bytes:
    """A frame whose parts are what they should be, or are not."""
    kind, flags = random.randrange(11), random.choice((0, 1, 4, 5, 8, 0x20, 0x2D, 0xFF))
    size = random.choice((0, 1, 4, 5, 6, 8, 8, 13, 40))
    payload = random.choice((bytes(size), b"\x7f" * size, random.randbytes(size)))
    return frames.frame(kind, flags, random.choice((0, 1, 1, 2, 3, 5, 2**31 - 1)), payload)


def hostile(random: Random, samples: Sequence[bytes]) -> bytes:
    begin = frames.PREFACE + frames.settings_frame({})
    match random.randrange(4):
        case 0:
            return begin + random.randbytes(random.randrange(200))
        case 1:
            return begin + b"".join(random_frame(random) for _ in range(random.randrange(20)))
        case 2:
            return random.choice(samples) + random_frame(random) + random.choice(samples)[24:]
        case _:
            return mutant(random, samples)


def check_frames(sent: bytes) -> list[Frame]:
    """The frames that were sent, each of them whole; a GOAWAY for a fault comes last."""
    found = [*parsed(sent)]
    goaways = [n for n, each in enumerate(found) if each.kind == frames.GOAWAY]
    assert goaways in ([], [len(found) - 1])
    return found


async def attack_server(random: Random) -> None:
    """One connection, by random pieces and once more at a time, which end alike."""
    data = hostile(random, [client_bytes(random) for _ in range(3)])
    in_pieces, at_once = Core(LIMITS), Core(LIMITS)
    sent, begin = in_pieces.taken(), 0
    while begin < len(data):
        end = begin + random.choice(PIECES)
        sent += in_pieces.feed(data[begin:end])
        begin = end
        check_held(in_pieces)
        if random.random() < 0.1:
            sent += await in_pieces.settled()
    check_frames(sent + await in_pieces.settled())
    assert len(sent) <= SENT_BYTES_MIN + SENT_PER_BYTE * len(data)
    at_once.feed(data)
    check_held(at_once)
    for core in (in_pieces, at_once):
        await core.lose()
        assert core.received.held == core.unsent.held == 0


def check_held(core: Core) -> None:
    """Check that the connection holds no more than its limits."""
    connection = core.connection
    assert len(connection.streams) <= LIMITS.streams_max
    assert 0 <= core.received.held <= LIMITS.received_bytes_max
    assert len(connection._rest) <= frames.HEADER_BYTES + frames.PAYLOAD_BYTES_MAX  # noqa: SLF001


@budgets
def test_a_server_survives_its_clients(times: int, caplog: pytest.LogCaptureFixture) -> None:
    """No bytes raise, none are held beyond the limits, and no handler is told nonsense."""
    caplog.set_level(logging.ERROR)
    for number, random in attempts("hostile clients", times * BUDGET_S):
        with replayable(number):
            run(attack_server, random)
            assert [record.getMessage() for record in caplog.records] == []


async def attack_client(random: Random) -> None:
    """A server that answers three calls with nonsense."""
    channel = WireChannel("a:1", ChannelOptions(limits=LIMITS))
    client, sender = client_connection(channel)
    client.receive(frames.settings_frame({}))
    calls = [StreamClientCall(channel, UNARY, metadata=(), deadline_s=None) for _ in range(3)]
    for call in calls:
        client.open(call)
    sender.take()  # the preface and the calls
    data, begin = server_bytes(random), 0
    while begin < len(data):
        end = begin + random.choice(PIECES)
        client.receive(data[begin:end])
        begin = end
        check_frames(sender.take())
    client.close_streams(frames.ErrorCode.CANCEL, "lost")
    for call in calls:
        assert call.is_done
        with suppress(CallFailed):
            while await call.read() is not None:
                pass
    assert channel.received.held == 0
    await channel.close()


def server_bytes(random: Random) -> bytes:
    """The bytes of a server, with changes."""
    ok = frames.header_frames(b"\x88\x5f\x10application/grpc", 0, 1)
    message = frames.frame(frames.DATA, 0, 1, b"\0\0\0\0\x03abc")
    trailers = frames.header_frames(b"\x00\x0bgrpc-status\x01\x30", frames.END_STREAM, 1)
    goaway = frames.goaway_frame(3, frames.ErrorCode.NO_ERROR, "drain")
    reset = frames.reset_frame(3, frames.ErrorCode.REFUSED_STREAM)
    samples = [ok + message + trailers, ok + goaway + message, reset + ok, trailers]
    if random.random() < 0.3:
        return b"".join(random_frame(random) for _ in range(random.randrange(20)))
    return mutant(random, samples)


@budgets
def test_a_client_survives_its_server(times: int, caplog: pytest.LogCaptureFixture) -> None:
    """No bytes raise, and every call ends with a status."""
    caplog.set_level(logging.ERROR)
    for number, random in attempts("hostile servers", times * BUDGET_S):
        with replayable(number):
            run(attack_client, random)
            assert [record.getMessage() for record in caplog.records] == []
