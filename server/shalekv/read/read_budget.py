"""A bound on the bytes that are fetched at once; requests beyond it wait in FIFO order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.concurrency import Waiter, complete, new_waiter


class ReadBudget:
    """Counts the bytes of requests in flight.

    REQUIRES: a request that holds a part of the budget does not wait for another part, or both may
    wait for ever.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._queue: dict[Waiter, int] = {}  # bytes of each request, in the order of arrival
        self.in_flight_bytes = 0
        self.in_flight_bytes_peak = 0
        self.waits = 0  # requests that had to wait

    @property
    def waiting_count(self) -> int:
        """Requests that wait now."""
        return len(self._queue)

    @asynccontextmanager
    async def reserve(self, size_bytes: int) -> AsyncIterator[None]:
        """Take `size_bytes` of the budget; a request larger than all of it is admitted alone."""
        if self._queue or not self._fits(size_bytes):
            await self._wait(size_bytes)
        else:
            self._take(size_bytes)
        try:
            yield
        finally:
            self._give_back(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return self.in_flight_bytes == 0 or self.in_flight_bytes + size_bytes <= self._bytes_max

    def _take(self, size_bytes: int) -> None:
        self.in_flight_bytes += size_bytes
        self.in_flight_bytes_peak = max(self.in_flight_bytes_peak, self.in_flight_bytes)

    async def _wait(self, size_bytes: int) -> None:
        waiter = new_waiter()
        self._queue[waiter] = size_bytes
        self.waits += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._queue.pop(waiter, None)
                self._admit()  # it may have held up a smaller one
            else:
                self._give_back(size_bytes)  # it was admitted just when it was cancelled
            raise

    def _give_back(self, size_bytes: int) -> None:
        self.in_flight_bytes -= size_bytes
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            waiter, size_bytes = next(iter(self._queue.items()))
            if waiter.done():
                del self._queue[waiter]  # it has just been cancelled, and takes nothing
                continue
            if not self._fits(size_bytes):
                return
            del self._queue[waiter]
            self._take(size_bytes)
            complete(waiter)
