"""The lease of whoever tries to be the writer: when it may be taken, and when it is lost.

Of two moments only ever one process's own clock is asked, never the clocks of two:

    holder       sends a renewal ------- gives up, HOLD_SHARE of the TTL later
    candidate           sees that renewal ------------- may take over, one whole TTL later

A candidate sees a renewal after it was sent. So the holder gives up before anybody takes over, as
long as no clock runs faster than another by more than what `HOLD_SHARE` leaves. Nothing but
availability rests on it: two that both hold a lease are kept apart by their epochs (I2).
"""

from __future__ import annotations

from dataclasses import dataclass

HOLD_SHARE = 0.9  # of the TTL: after that, a holder that could not renew has lost its lease
RENEWALS = 3  # are tried within a TTL
POLLS = 10  # of a candidate within a TTL, at least

OVER_MS = 1  # after its end a lease is over, however a clock is rounded

KEPT = 8  # leases before the current one, for those who look at them now


@dataclass(frozen=True, slots=True)
class ElectionLease:
    """What a lease says. Who holds one renews it by another one, of the same nonce."""

    holder: str  # HOST:PORT under which clients reach it
    nonce: bytes  # drawn for each tenure
    ttl_ms: int
    is_released: bool = False  # it may be taken at once


@dataclass(frozen=True, slots=True)
class Sighting:
    """The newest lease that a candidate has seen, and when it saw it first, by its own clock."""

    lease_id: int
    lease: ElectionLease
    seen_ms: float

    def is_over(self, now_ms: float) -> bool:
        """Whether its holder has had a whole TTL to renew it."""
        return self.lease.is_released or self.left_ms(now_ms) <= 0

    def left_ms(self, now_ms: float) -> float:
        """How long its holder still has to renew it."""
        return self.seen_ms + self.lease.ttl_ms - now_ms


def sight(before: Sighting | None, lease_id: int, lease: ElectionLease, now_ms: float) -> Sighting:
    """What a candidate knows that now sees this lease as the newest one."""
    if before is not None and before.lease_id == lease_id:
        return before
    return Sighting(lease_id, lease, now_ms)


def lapses_ms(renewed_ms: float, ttl_ms: int) -> float:
    """When a lease is lost whose last renewal was sent at `renewed_ms`."""
    return renewed_ms + HOLD_SHARE * ttl_ms


def renew_wait_ms(ttl_ms: int) -> float:
    """How long a holder waits before the next renewal."""
    return ttl_ms / RENEWALS


def poll_wait_ms(ttl_ms: int, chance: float) -> float:
    """How long a candidate waits before it looks again; `chance` is a random number of 0 to 1."""
    return ttl_ms / POLLS * (0.5 + 0.5 * chance)


def look_wait_ms(seen: Sighting | None, ttl_ms: int, chance: float, now_ms: float) -> float:
    """How long a candidate waits that has seen this lease: not beyond the end of the lease."""
    wait_ms = poll_wait_ms(ttl_ms, chance)
    left_ms = 0.0 if seen is None else seen.left_ms(now_ms)
    return min(wait_ms, left_ms + OVER_MS) if left_ms > 0 else wait_ms


def is_outdated(lease_id: int, current_id: int) -> bool:
    """Whether this lease may be deleted while that one is the current one."""
    return lease_id < current_id - KEPT
