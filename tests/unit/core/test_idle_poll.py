"""Polls become rare while nothing changes, and frequent again when something does."""

from __future__ import annotations

from shalekv.core.idle_poll import IdlePoll


def test_waits_double_up_to_the_longest() -> None:
    """Each look that sees the same doubles the wait, up to a bound."""
    poll = IdlePoll(1_000, 10_000)
    waits = []
    for _ in range(6):
        poll.look("same")
        waits.append(poll.wait_ms)
    assert waits == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]


def test_a_change_is_followed_closely() -> None:
    """A look that sees something new sets the wait back to the shortest."""
    poll = IdlePoll(1_000, 10_000)
    for seen in ("a", "a", "a", "b"):
        poll.look(seen)
    assert poll.wait_ms == 1_000


def test_the_longest_wait_is_never_below_the_first() -> None:
    """A longest wait below the first one is the first one."""
    poll = IdlePoll(1_000, 10)
    poll.look("a")
    poll.look("a")
    assert poll.wait_ms == 1_000
