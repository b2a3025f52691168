"""How many bytes are fetched at once: past the bound, requests wait in the order they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.concurrency import Waiter, new_waiter, tell


class ReadBudget:
    """Counts bytes of requests in and out.

    REQUIRES: who has room waits for nobody else's, or both wait for ever.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._line: dict[Waiter, int] = {}  # bytes that each asks for, in the order of arrival
        self.in_flight_bytes = 0
        self.in_flight_bytes_peak = 0
        self.waits = 0  # requests that did not find room at once

    @property
    def waiting_count(self) -> int:
        """Requests that wait now."""
        return len(self._line)

    @asynccontextmanager
    async def room(self, size_bytes: int) -> AsyncIterator[None]:
        """Room for a request of so many bytes; one larger than the bound is let in alone."""
        if self._line or not self._has_room(size_bytes):
            await self._wait(size_bytes)
        else:
            self._take(size_bytes)
        try:
            yield
        finally:
            self._leave(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return self.in_flight_bytes == 0 or self.in_flight_bytes + size_bytes <= self._bytes_max

    def _take(self, size_bytes: int) -> None:
        self.in_flight_bytes += size_bytes
        self.in_flight_bytes_peak = max(self.in_flight_bytes_peak, self.in_flight_bytes)

    async def _wait(self, size_bytes: int) -> None:
        waiter = new_waiter()
        self._line[waiter] = size_bytes
        self.waits += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._line.pop(waiter, None)
                self._admit()  # it may have been in the way of a smaller one
            else:
                self._leave(size_bytes)  # room was made in the moment in which it was cancelled
            raise

    def _leave(self, size_bytes: int) -> None:
        self.in_flight_bytes -= size_bytes
        self._admit()

    def _admit(self) -> None:
        while self._line:
            waiter, size_bytes = next(iter(self._line.items()))
            if waiter.done():
                del self._line[waiter]  # it has just been cancelled, and takes nothing
                continue
            if not self._has_room(size_bytes):
                return
            del self._line[waiter]
            self._take(size_bytes)
            tell(waiter)
