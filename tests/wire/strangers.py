"""Strangers at the port of a server with TLS, or without: they know nothing that it expects.

`-m tests.wire.strangers NAME,NAME HOST:PORT SECONDS SEED`: each lasts so long. Prints as JSON how
many of its connections the server has ended.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress

from shalekv_wire import frames
from tests.wire.attackers import GET, PUT, Target, header

HELD = 50  # connections that are held at once
CONNECTIONS = 5_000  # of those that say nothing
PIECE = 64 * 1024
SHORT_S = 0.05  # for an answer to what may need none
Stranger = Callable[["Port"], None]


class Port(Target):
    """The port, and the strangeness of one stranger."""

    def __init__(self, address: str, seconds: float, seed: str) -> None:
        super().__init__(address, seconds)
        self.random = random.Random(seed)

    def secured(self, *protocols: str) -> ssl.SSLSocket:
        """A connection with TLS and these protocols. Raises `OSError` when it is refused."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if protocols:
            context.set_alpn_protocols([*protocols])
        sock = self.open()
        sock.settimeout(5.0)
        return context.wrap_socket(sock)

    def say(self, sock: socket.socket, data: bytes, wait_s: float = 0.5) -> None:
        """Send as much as the server takes, and count the connection if it has ended it."""
        sock.settimeout(wait_s)
        with sock:
            try:
                sock.sendall(data)
                while sock.recv(PIECE):
                    pass
                self.ended += 1
            except TimeoutError:
                pass
            except OSError:
                self.ended += 1

    def drip(self, socks: list[socket.socket], data: bytes) -> None:
        """Send a byte on each connection again and again."""
        at = 0
        while self.is_open and socks:
            for sock in socks:
                with suppress(OSError):
                    sock.sendall(data[at % len(data) :][:1])
            at += 1
        self.hold(socks)


def hello() -> bytes:
    """The first message of a client of TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def half_handshakes(port: Port) -> None:
    """Clients of TLS that stop in the middle of their first message, or behind it."""
    said, socks = hello(), []
    for number in range(4 * HELD):
        sock = port.open()
        with suppress(OSError):
            sock.sendall(said if number % 2 else said[: len(said) // 2])
        socks.append(sock)
    port.hold(socks)


def endless_handshakes(port: Port) -> None:
    """Handshake records without end: of a message of 16 MiB, and of empty ones."""
    record = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + bytes(16_380)
    while port.is_open:
        port.say(port.open(), record * 64)
        port.say(port.open(), b"\x16\x03\x01\x00\x00" * 10_000)


def garbled_handshakes(port: Port) -> None:
    """First messages with bytes of chance in them."""
    said = hello()
    while port.is_open:
        garbled = bytearray(said)
        for _ in range(port.random.randint(1, 8)):
            garbled[port.random.randrange(5, len(garbled))] = port.random.randrange(256)
        port.say(port.open(), bytes(garbled), SHORT_S)


def wrong_protocols(port: Port) -> None:
    """Clients of TLS that choose HTTP/1.1, or nothing."""
    while port.is_open:
        for protocols in ((), ("http/1.1",), ("h3", "grpc-exp")):
            try:
                port.say(port.secured(*protocols), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            except OSError:
                port.ended += 1


def plain_http(port: Port) -> None:
    """Browsers: HTTP/1.1, with short requests, and a header and a body without end."""
    begin = b"POST / HTTP/1.1\r\nHost: a\r\n"
    while port.is_open:
        port.say(port.open(), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        port.say(port.open(), begin + b"X-Long: aaaaaaaaaaaaaaa\r\n" * 100_000)
        port.say(port.open(), begin + b"Content-Length: 9999999999\r\n\r\n" + bytes(4_000_000))


def tls_to_any(port: Port) -> None:
    """Clients of TLS, whatever the server speaks."""
    while port.is_open:
        try:
            port.say(port.secured("h2"), b"")
        except OSError:
            port.ended += 1
        port.say(port.open(), hello())


def noise(port: Port) -> None:
    """Bytes of chance."""
    while port.is_open:
        port.say(port.open(), port.random.randbytes(100_000))


def fuzzed_frames(port: Port) -> None:
    """HTTP/2 whose frames have headers and contents of chance, inside of TLS and without it."""
    while port.is_open:
        chance = port.random
        pieces = [frames.PREFACE, frames.settings_frame({})]
        for stream_id in range(1, 40, 2):
            block = bytearray(header(chance.choice((GET, PUT))))
            if chance.random() < 0.5:
                block[chance.randrange(len(block))] = chance.randrange(256)
            pieces.append(frames.header_frames(bytes(block), 0, stream_id))
            body = chance.randbytes(chance.randrange(200))
            kind, flags = chance.randrange(12), chance.randrange(256)
            pieces.append(frames.frame(kind, flags, chance.randrange(42), body))
        said = b"".join(pieces)
        with suppress(OSError):
            port.say(port.secured("h2"), said, SHORT_S)
        port.say(port.open(), said, SHORT_S)


def dripped_headers(port: Port) -> None:
    """Header blocks that come byte by byte, inside of TLS and without it."""
    block = frames.frame(frames.HEADERS, 0, 1, header(GET)) + frames.frame(
        frames.CONTINUATION, 0, 1, b"\x00\x01x\x01y" * 1_000
    )
    socks: list[socket.socket] = []
    for _ in range(HELD):
        with suppress(OSError):
            socks.append(port.secured("h2"))
        socks.append(port.open())
    port.drip(socks, frames.PREFACE + frames.settings_frame({}) + block)


def dripped_handshakes(port: Port) -> None:
    """First messages of TLS that come byte by byte."""
    port.drip([port.open() for _ in range(2 * HELD)], hello())


def idlers(port: Port) -> None:
    """Connections that say nothing."""
    port.hold([port.open() for _ in range(8 * HELD)])


def crowds(port: Port) -> None:
    """As many connections as there may be, some of them with TLS."""
    socks: list[socket.socket] = []
    for number in range(CONNECTIONS):
        try:
            socks.append(port.secured("h2") if number % 4 == 0 else port.open())
        except OSError:
            port.ended += 1
    port.hold(socks)


STRANGERS: dict[str, Stranger] = {
    each.__name__: each
    for each in (
        half_handshakes,
        endless_handshakes,
        garbled_handshakes,
        wrong_protocols,
        plain_http,
        tls_to_any,
        noise,
        fuzzed_frames,
        dripped_headers,
        dripped_handshakes,
        idlers,
        crowds,
    )
}


if __name__ == "__main__":
    ended = {}
    for name in sys.argv[1].split(","):
        port = Port(sys.argv[2], float(sys.argv[3]), sys.argv[4])
        STRANGERS[name](port)
        ended[name] = port.ended
    sys.stdout.write(json.dumps(ended))
