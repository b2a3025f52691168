"""Logical time: the store's clock, never going back (protocol, "Three rules against time")."""

from __future__ import annotations

from shalekv.clock import Clock


class LogicalTime:
    """The time that expiry is judged by.

    Taken from the store when the writer opens and carried on by the local clock's pace; what was
    stored before in WAL objects and manifest is its floor, so that a value that had expired for a
    reader never comes back (I2, I5).
    """

    def __init__(self, clock: Clock, *, store_now_ms: int, floor_ms: int) -> None:
        """`store_now_ms` is what the store's clock shows now."""
        self._clock = clock
        self._offset_ms = store_now_ms - clock.monotonic_ms()
        self._last_ms = floor_ms

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; never less than before."""
        self._last_ms = max(self._last_ms, int(self._clock.monotonic_ms() + self._offset_ms))
        return self._last_ms

    def raise_to(self, floor_ms: int) -> None:
        """Never show less than `floor_ms` from now on."""
        self._last_ms = max(self._last_ms, floor_ms)

    def set(self, store_now_ms: int) -> None:
        """The store's clock shows this now; time does not go back for it."""
        self._offset_ms = store_now_ms - self._clock.monotonic_ms()
