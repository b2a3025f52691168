"""How fast a compaction may read and write."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.clock import Clock

_MS_PER_S = 1_000
_BURST_MS = 100  # what was not used before counts for so long at most


class Pace:
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
