"""Deadlines of operations, by one timer."""

from __future__ import annotations

import asyncio

from shalekv_client import operations
from shalekv_client.deadlines import Deadlines
from shalekv_client.outbox import Pending

GET = operations.get(b"k")


class Bell:
    """Notes which deadlines have passed, and when."""

    def __init__(self) -> None:
        self.rung: list[tuple[int, float]] = []
        self.rang = asyncio.Event()

    def __call__(self, pending: Pending) -> None:
        self.rung.append((pending.number, asyncio.get_running_loop().time()))
        self.rang.set()


def pending(number: int) -> Pending:
    return Pending(number, GET, asyncio.get_running_loop().create_future(), 1)


async def test_deadlines_pass_in_order_and_never_early() -> None:
    """Each deadline passes after its time, whatever the order in which they were added."""
    bell = Bell()
    deadlines = Deadlines(bell)
    began_s = asyncio.get_running_loop().time()
    for number, timeout_ms in enumerate([60, 20, 40, 1]):
        deadlines.add(pending(number), timeout_ms)
    while len(bell.rung) < 4:
        bell.rang.clear()
        await bell.rang.wait()
    assert [number for number, _ in bell.rung] == [3, 1, 2, 0]
    for number, at_s in bell.rung:
        assert at_s - began_s >= [0.06, 0.02, 0.04, 0.001][number]


async def test_what_is_taken_out_does_not_pass() -> None:
    """An operation that was answered in time is left alone, and the next deadline still counts."""
    bell = Bell()
    deadlines = Deadlines(bell)
    answered = pending(0)
    deadlines.discard(deadlines.add(answered, 5), answered)
    deadlines.add(pending(1), 30)
    await bell.rang.wait()
    assert [number for number, _ in bell.rung] == [1]
