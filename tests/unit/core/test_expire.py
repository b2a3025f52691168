"""The operation of a sweep: it deletes what has expired, and nothing else."""

from __future__ import annotations

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Add, Change, Expire, Get, Put, Transaction
from tests.kit.states import NOW_MS, DictState, entry_of, state_of

EXPIRED = entry_of(b"k", b"v", 5, NOW_MS)


def expire(state: DictState, known: Entry | None = None) -> list[Change]:
    """What is changed."""
    return [*Transaction([Expire(b"k", known)]).decide(state).changes]


def test_expired_value_becomes_a_tombstone_that_says_so() -> None:
    """It tells when the value expired, whether memory holds it or only the levels do."""
    told = [Change(b"k", Kind.TOMBSTONE, b"", NOW_MS)]
    assert expire(state_of(EXPIRED)) == told
    assert expire(state_of(), EXPIRED) == told


@pytest.mark.parametrize(
    "newest",
    [
        entry_of(b"k", b"v", 6),
        entry_of(b"k", b"v", 6, NOW_MS + 1),
        Entry(b"k", 6, Kind.TOMBSTONE),
        Entry(b"k", 6, Kind.TOMBSTONE, b"", NOW_MS),
        Entry(b"a", 6, Kind.RANGE_TOMBSTONE, b"z"),
    ],
)
def test_whatever_is_newer_stays(newest: Entry) -> None:
    """A value that lives, a delete, and the tombstone of another sweep; what was known is old."""
    state = DictState({b"k": newest})
    assert expire(state) == []
    assert expire(state, EXPIRED) == []


def test_sweep_rests_on_state_and_asks_for_what_it_does_not_know() -> None:
    """All before it must be durable; only unknown keys are looked up."""
    transaction = Transaction([Expire(b"a"), Expire(b"b", EXPIRED), Expire(b"c")])
    assert transaction.rests_on_state
    assert transaction.needs().keys == (b"a", b"c")
    assert not Transaction([Put(b"k", b"v")]).rests_on_state


def test_tombstone_of_a_sweep_is_one_like_any_other() -> None:
    """Reads find nothing, a range with it is empty, and a counter begins anew."""
    swept = DictState({b"k": Entry(b"k", 6, Kind.TOMBSTONE, b"", NOW_MS - 1)})
    assert swept.visible(b"k") is None
    assert not swept.has_keys(KeyRange(b"", b""))
    decision = Transaction([Get(b"k"), Add(b"k", 3)]).decide(swept)
    assert decision.results[1] == 3
    assert not Entry(b"k", 6, Kind.TOMBSTONE, b"", NOW_MS + 1).is_visible(NOW_MS)
