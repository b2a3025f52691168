"""Deletes many objects in batches, no faster than is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from shalekv.clock import Clock
from shalekv.store.api import ObjectStore

BATCH_MAX = 1_000  # as many as object stores delete at once


class Deleter:
    """Deletes objects of one database. What was deleted lately counts for the next call, too."""

    def __init__(self, store: ObjectStore, clock: Clock, *, per_s_count: int) -> None:
        """At most `per_s_count` objects a second."""
        self._store = store
        self._clock = clock
        self._per_s_count = per_s_count
        self._free_at_ms = clock.monotonic_ms()

    async def delete(self, names: Iterable[str]) -> None:
        """Delete these objects in their order, batch by batch."""
        remaining = iter(names)
        while batch := [*islice(remaining, min(BATCH_MAX, self._per_s_count))]:
            wait_ms = self._free_at_ms - self._clock.monotonic_ms()
            if wait_ms > 0:
                await self._clock.sleep_ms(wait_ms)
            began_ms = self._clock.monotonic_ms()
            await self._store.delete(batch)
            self._free_at_ms = began_ms + 1_000 * len(batch) / self._per_s_count
