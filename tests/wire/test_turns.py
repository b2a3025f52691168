"""Bounds of the work of one connection in one turn of the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import uvloop

from shalekv_wire import frames
from shalekv_wire.server import ServerCall, Unary
from tests.kit.timeouts import until
from tests.wire.serving import ECHO, request, serving

CALLS = 30_000
PIECE_BYTES_MAX = 256_000  # that uvloop reads at once


def test_a_client_that_sends_much_leaves_turns_to_others() -> None:
    """Of megabytes of requests, one piece is taken in a turn of the loop; uvloop would take all."""
    uvloop.run(_send_much())


async def _send_much() -> None:
    loop = asyncio.get_running_loop()
    turn, calls_of_turn = 0, Counter[int]()

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count_turn)

    def handle(call: ServerCall, _message: bytes) -> None:
        calls_of_turn[turn] += 1
        call.reset()

    calls = [request(2 * number + 1, ECHO, b"x" * 100) for number in range(CALLS)]
    async with serving() as it:
        it.methods.by_path[ECHO] = Unary(handle)
        host, port = it.address.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            greeting = frames.PREFACE + frames.settings_frame({})
            sending = asyncio.create_task(loop.sock_sendall(client, greeting + b"".join(calls)))
            count_turn()
            await until(lambda: calls_of_turn.total() >= CALLS // 2, "half of the calls")
            sending.cancel()
    most = max(calls_of_turn.values())
    assert most * len(calls[0]) <= PIECE_BYTES_MAX + len(calls[0])
