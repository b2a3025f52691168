"""Intervals of keys: where a prefix ends, what is empty, and what some of them are together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.key_range import KeyRange, coalesced, prefix_end

KEYS = st.binary(min_size=1, max_size=2)
BOUNDS = st.binary(max_size=2)


def contains(keys: KeyRange, key: bytes) -> bool:
    """Whether the key is in the interval, word for word as it is defined."""
    return keys.start <= key and (not keys.end or key < keys.end)


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        (b"a", b"b"),
        (b"ab", b"ac"),
        (b"a\xff", b"b"),
        (b"a\xfe\xff\xff", b"a\xff"),
        (b"\xff", b""),
        (b"\xff\xff", b""),
        (b"\x00", b"\x01"),
    ],
)
def test_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    """The first key behind a prefix; of nothing but 0xff there is none."""
    assert prefix_end(prefix) == end


@given(prefix=st.binary(min_size=1, max_size=3), key=st.binary(max_size=5))
def test_prefix_is_the_interval_up_to_its_end(prefix: bytes, key: bytes) -> None:
    """A key begins with a prefix exactly if it is in the interval that a scan reads."""
    assert key.startswith(prefix) == contains(KeyRange(prefix, prefix_end(prefix)), key)


@given(
    ranges=st.lists(
        st.builds(KeyRange, BOUNDS, BOUNDS).filter(lambda keys: not keys.is_empty), max_size=8
    ),
    key=KEYS,
)
def test_coalesced_ranges_are_the_same_keys(ranges: list[KeyRange], key: bytes) -> None:
    """The same keys in ranges that stand in order and do not even touch each other."""
    merged = coalesced(ranges)
    assert any(contains(keys, key) for keys in merged) == any(contains(r, key) for r in ranges)
    for before, after in pairwise(merged):
        assert before.end
        assert before.end < after.start
