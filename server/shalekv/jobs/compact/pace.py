"""Bounds for the I/O of a compaction: its rate, and the time the store may take to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shalekv.clock import Clock
from shalekv.errors import StoreUnavailable
from shalekv.settings import KIB

_MS_PER_S = 1_000
_BURST_MS = 100  # unused rate accumulates for this long at most
# Time for one object or a part of it, all attempts together. Large ones get more time:
ANSWER_S = 120
SLOWEST_BYTES_PER_S = 256 * KIB


@asynccontextmanager
async def request_deadline(
    store_url: str, operation: str, name: str, size_bytes: int
) -> AsyncIterator[None]:
    """Raise `StoreUnavailable` if the request in this context is not answered in time.

    A merge holds memory that other databases of its process may wait for. It must not wait forever
    for a full disk or a silent store.
    """
    limit_s = ANSWER_S + size_bytes / SLOWEST_BYTES_PER_S
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        problem = f"not done within {limit_s:.0f} s, however often it was tried"
        raise StoreUnavailable(store_url, operation, name, problem) from None


class TokenBucket:
    """A token bucket: one token for each byte, refilled at a rate by the local clock."""

    def __init__(
        self, clock: Clock, bytes_per_s: float, is_lifted: Callable[[], bool] = lambda: False
    ) -> None:
        """`bytes_per_s` of 0 means no bound; nor is there one while `is_lifted` returns True."""
        self._clock = clock
        self._bytes_per_ms = bytes_per_s / _MS_PER_S
        self._is_lifted = is_lifted
        self._free_at_ms = clock.monotonic_ms()  # when all tokens taken so far are refilled

    async def take(self, size_bytes: int) -> None:
        """Wait until the tokens taken before are refilled, then take tokens for `size_bytes`."""
        if not self._bytes_per_ms:
            return
        now_ms = self._clock.monotonic_ms()
        wait_ms = self._free_at_ms - now_ms
        while wait_ms > 0 and not self._is_lifted():
            await self._clock.sleep_ms(min(wait_ms, _BURST_MS))
            now_ms = self._clock.monotonic_ms()
            wait_ms = self._free_at_ms - now_ms
        begin_ms = (
            now_ms - _BURST_MS if self._is_lifted() else max(self._free_at_ms, now_ms - _BURST_MS)
        )
        self._free_at_ms = begin_ms + size_bytes / self._bytes_per_ms
