"""The time of a store by the headers of its replies, which one server's wrong clock cannot move."""

from __future__ import annotations

from dataclasses import dataclass

# What a reply may be ahead of the replies before it.
LEAP_MS = 60_000


@dataclass(frozen=True, slots=True)
class _Reading:
    told_ms: int
    heard_at_ms: float  # by the monotonic clock of this process

    def ahead_of_ms(self, earlier: _Reading) -> float:
        """How much more time has passed for the store than here since `earlier`."""
        passed_ms = self.heard_at_ms - earlier.heard_at_ms
        return self.told_ms - earlier.told_ms - passed_ms


class StoreClock:
    """The latest time that a store told. It never goes back, so it must not leap ahead either.

    What is deleted, and which leases are over, is decided by it for the life of the process.
    """

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._latest: _Reading | None = None
        self._doubted: _Reading | None = None

    def heard(self, told_ms: int, heard_at_ms: float) -> int | None:
        """The store's time after a reply that told `told_ms`; None if that is not believed yet.

        A leap is believed when the next reply agrees with it: the store's clock was set, or this
        machine slept, and its monotonic clock with it.
        """
        told = _Reading(told_ms, heard_at_ms)
        doubted, self._doubted = self._doubted, None
        if self._latest is None:
            self._latest = told
        leaps = told.ahead_of_ms(self._latest) > LEAP_MS
        if leaps and (doubted is None or abs(told.ahead_of_ms(doubted)) > LEAP_MS):
            self._doubted = told
            return None
        if told_ms >= self._latest.told_ms:
            self._latest = told
        return self._latest.told_ms
