"""How fast a compaction may read and write, and how slowly a store may answer it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shalekv.clock import Clock
from shalekv.errors import StoreUnavailable
from shalekv.settings import KIB

_MS_PER_S = 1_000
_BURST_MS = 100  # what was not used before counts for so long at most
ANSWER_S = 120  # of one object or piece of it, all attempts together, and longer if it is large:
SLOWEST_BYTES_PER_S = 256 * KIB


@asynccontextmanager
async def answered(
    store_url: str, operation: str, name: str, size_bytes: int
) -> AsyncIterator[None]:
    """Raise `StoreUnavailable` when a request of a merge is not answered in time.

    A merge holds memory, and other databases of its process may wait for that: it must not wait
    for ever for a disk that is full or a store that is silent.
    """
    limit_s = ANSWER_S + size_bytes / SLOWEST_BYTES_PER_S
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        problem = f"not done within {limit_s:.0f} s, however often it was tried"
        raise StoreUnavailable(store_url, operation, name, problem) from None


class TokenBucket:
    """A bucket of tokens, each good for one byte; it is filled at the rate, by the local clock."""

    def __init__(
        self, clock: Clock, bytes_per_s: float, is_lifted: Callable[[], bool] = lambda: False
    ) -> None:
        """`bytes_per_s` of 0 is no bound; nor is there one while `is_lifted` says so."""
        self._clock = clock
        self._bytes_per_ms = bytes_per_s / _MS_PER_S
        self._is_lifted = is_lifted
        self._free_at_ms = clock.monotonic_ms()  # when all that was taken is paid for

    async def take(self, size_bytes: int) -> None:
        """Wait until what was taken before is paid for, and take so many bytes."""
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
