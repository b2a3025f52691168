"""A clock that a test moves; a wait of nothing lets other tasks run."""

from __future__ import annotations

import asyncio
import heapq
from random import Random

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from tests.kit.inline_runtime import InlineWorkers


class HandClock(LoopClock):
    """Clock that moves only by `advance`."""

    def __init__(self) -> None:
        self._now_ms = 1_000.0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def monotonic_ms(self) -> float:
        return self._now_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait until the test has moved the clock by this much."""
        if duration_ms <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (self._now_ms + duration_ms, self._count, woken))
        await woken

    def advance(self, duration_ms: float) -> None:
        """Move the clock, and wake the tasks whose time has come."""
        self._now_ms += duration_ms
        while self._waiting and self._waiting[0][0] <= self._now_ms:
            woken = heapq.heappop(self._waiting)[2]
            if not woken.done():
                woken.set_result(None)


def hand_runtime(clock: HandClock, seed: int) -> Runtime:
    """A runtime on this clock, whose workers work inline."""
    return Runtime(clock, Random(seed), InlineWorkers())
