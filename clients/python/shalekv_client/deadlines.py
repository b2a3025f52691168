"""Deadlines of many operations with one timer.

Nearly all operations are answered long before their deadline, so what has to be cheap is to add a
deadline and to take it back. Deadlines are gathered in buckets of a few milliseconds, and the one
timer is set for the first bucket that may hold something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

from shalekv_client.outbox import Pending

BUCKET_MS = 5.0  # an operation gets at most this much more time than it asked for


Bucket: TypeAlias = set[Pending]


class Deadlines:
    """Calls `expire` with each operation whose time is over and that was not taken out before."""

    def __init__(self, expire: Callable[[Pending], None]) -> None:
        """Needs a running event loop."""
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._buckets: dict[int, Bucket] = {}
        self._numbers: list[int] = []  # of the buckets; a heap
        self._timer: asyncio.TimerHandle | None = None

    def add(self, pending: Pending, timeout_ms: float) -> Bucket:
        """Returns what `discard` needs when `pending` needs no deadline any more."""
        number = int((self._loop.time() * 1000.0 + timeout_ms) / BUCKET_MS) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = set()
            heappush(self._numbers, number)
            if self._numbers[0] == number:
                self._set_timer()
        bucket.add(pending)
        return bucket

    @staticmethod
    def discard(bucket: Bucket, pending: Pending) -> None:
        """Take a deadline back."""
        bucket.discard(pending)
        if not bucket:
            bucket.clear()  # a set that was large keeps its memory, and buckets live for long

    def close(self) -> None:
        """Expire nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._numbers[0] * BUCKET_MS / 1000.0, self._ring)

    def _ring(self) -> None:
        now = self._loop.time() * 1000.0 / BUCKET_MS
        self._timer = None
        while self._numbers and (self._numbers[0] <= now or not self._buckets[self._numbers[0]]):
            for pending in self._buckets.pop(heappop(self._numbers)):
                self._expire(pending)
        if self._numbers:
            self._set_timer()
