"""A writer whose reads of the levels wait until a test lets them pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.kit.engine.databases import Database
from tests.kit.serving.roles import NEVER_POLLED, Serving, serving
from tests.kit.store import Request


class SlowLevels:
    """A store that holds the reads of levels that the test chooses."""

    def __init__(self) -> None:
        self.is_slow: Callable[[str], bool] = lambda _: False
        self.held_reads: list[asyncio.Future[None]] = []

    async def before(self, request: Request) -> None:
        """Hold the request if it is such a read."""
        if request.operation == "get_range" and self.is_slow(request.name):
            self.held_reads.append(asyncio.get_running_loop().create_future())
            await self.held_reads[-1]

    def pass_reads(self, is_slow: Callable[[str], bool]) -> None:
        """Answer all reads that are held, and hold others from now on."""
        self.is_slow = is_slow
        held, self.held_reads = self.held_reads, []
        for waiter in held:
            if not waiter.done():
                waiter.set_result(None)

    async def read(self) -> None:
        while not self.held_reads:  # noqa: ASYNC110 - the reader is told of nothing
            await asyncio.sleep(0)


@asynccontextmanager
async def slow_levels(
    database: Database, **settings: Any
) -> AsyncIterator[tuple[Serving, SlowLevels]]:
    """A writer with such a store."""
    levels = SlowLevels()
    async with serving(database, before=levels.before, **NEVER_POLLED, **settings) as writer:
        yield writer, levels
