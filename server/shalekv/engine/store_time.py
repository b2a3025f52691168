"""Moments by the store's clock, as moments of lapsed time in this process."""

from __future__ import annotations

import math

from shalekv.store.cas import CasStore

UNSURE_MS = 1_000  # a store tells its time in whole seconds, and clocks of processes go apart


class StoreTime:
    """Compares the clock of the store with the one of this process, now and then."""

    def __init__(self, store: CasStore, interval_ms: float) -> None:
        """Once in `interval_ms` at most the store is asked."""
        self._store = store
        self._clock = store.runtime.clock
        self._interval_ms = interval_ms
        self._compared_ms = -math.inf
        self._ahead_ms = 0.0  # of the store's clock

    async def lapsed_ms(self, store_ms: int) -> float:
        """Not after the moment when the store's clock showed this. Raises `StoreUnavailable`."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._compared_ms >= self._interval_ms:
            self._ahead_ms = await self._store.reads.now_ms() - now_ms
            self._compared_ms = now_ms
        return store_ms - self._ahead_ms - UNSURE_MS
