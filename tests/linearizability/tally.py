"""What tasks of a test wait for: that something has happened so often, or that all is quiet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Tally:
    """How often something has happened."""

    def __init__(self) -> None:
        self.count = 0
        self._goals: list[tuple[int, asyncio.Event]] = []

    def add(self) -> None:
        self.count += 1
        for goal, reached in self._goals:
            if goal <= self.count:
                reached.set()

    async def more(self, count: int, *, within_s: float | None = None) -> None:
        """Wait until it has happened so many times more than now; raises TimeoutError."""
        reached = asyncio.Event()
        waiting = (self.count + count, reached)
        if not count:
            return
        self._goals.append(waiting)
        try:
            async with asyncio.timeout(within_s):
                await reached.wait()
        finally:
            self._goals.remove(waiting)


class Gate:
    """Lets operations through, and knows when none is under way."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def empty(self, *, within_s: float) -> None:
        """Wait until no operation is under way; raises TimeoutError."""
        async with asyncio.timeout(within_s):
            await self._empty.wait()
