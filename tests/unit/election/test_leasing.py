"""When a lease may be taken, and when it is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.leasing import (
    KEPT,
    ElectionLease,
    Sighting,
    is_outdated,
    lapses_ms,
    poll_wait_ms,
    renew_wait_ms,
    sight,
)

TTL_MS = 3_000
LEASE = ElectionLease("there:7654", b"n" * 16, TTL_MS)
RELEASED = ElectionLease("there:7654", b"n" * 16, TTL_MS, is_released=True)


@given(
    sent_ms=st.floats(0, 1e9),
    travel_ms=st.floats(0, 1e5),
    ttl_ms=st.integers(500, 600_000),
    drift=st.floats(0.95, 1.05),
)
def test_a_holder_gives_up_before_a_candidate_may_take_over(
    sent_ms: float, travel_ms: float, ttl_ms: int, drift: float
) -> None:
    """However late a candidate sees a renewal, and though its clock is a little faster."""
    lapsed_ms = lapses_ms(sent_ms, ttl_ms)
    seen_ms = sent_ms + travel_ms
    sighting = Sighting(1, ElectionLease("h", b"", ttl_ms), seen_ms)
    elapsed_ms = (lapsed_ms - seen_ms) * drift  # by the clock of the candidate
    assert not sighting.is_over(seen_ms + elapsed_ms)


def test_a_lease_lasts_from_its_first_sighting() -> None:
    """Seen again it is no younger; a later one begins anew."""
    first = sight(None, 7, LEASE, 100.0)
    assert sight(first, 7, LEASE, 900.0) is first
    assert not first.is_over(100.0 + TTL_MS - 1)
    assert first.is_over(100.0 + TTL_MS)
    assert not sight(first, 8, LEASE, 100.0 + TTL_MS).is_over(100.0 + TTL_MS)


def test_a_released_lease_is_over_at_once() -> None:
    """Whoever sees it may take it."""
    assert sight(None, 7, RELEASED, 100.0).is_over(100.0)


def test_several_renewals_fit_into_a_lease() -> None:
    """One that fails is not the end; candidates look more often than holders renew."""
    assert 2 * renew_wait_ms(TTL_MS) < lapses_ms(0.0, TTL_MS)
    assert poll_wait_ms(TTL_MS, 0.0) < poll_wait_ms(TTL_MS, 1.0) < renew_wait_ms(TTL_MS)


def test_the_newest_leases_stay() -> None:
    """Those who look at the current one, or have just seen one before, find it."""
    assert [each for each in range(30) if not is_outdated(each, 29)] == list(range(29 - KEPT, 30))
