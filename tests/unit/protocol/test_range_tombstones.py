"""Tests of range tombstones against a plain model, a list of intervals; and of key ranges."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shalekv.protocol.entry import (
    END_OF_KEYS,
    FRAGMENT_BYTES,
    NO_RANGE_TOMBSTONES,
    Entry,
    Fragment,
    KeyRange,
    Kind,
    coalesced,
    prefix_end,
)

BOUNDS = st.text("abc", max_size=2).map(str.encode)
RANGES = st.builds(KeyRange, BOUNDS, BOUNDS).filter(lambda keys: not keys.is_empty)
# The deletes of each commit, in order: ranges that do not touch, as in a decision.
COMMITS = st.lists(st.lists(RANGES, min_size=1, max_size=3).map(coalesced), max_size=8)


def tombstone(start: bytes, end: bytes, seq: int) -> Entry:
    return Entry(start, seq, Kind.RANGE_TOMBSTONE, end)


def tombstones_of(commits: list[list[KeyRange]]) -> list[Entry]:
    return [tombstone(*keys, seq) for seq, each in enumerate(commits, 1) for keys in each]


def newest_over(tombstones: list[Entry], key: bytes) -> int:
    """Return the greatest sequence number of all tombstones over a key; 0: none."""
    return max(
        (t.seq for t in tombstones if t.key <= key and (not t.value or key < t.value)), default=0
    )


def fragments_of(tombstones: list[Entry]) -> list[Fragment]:
    """Return the fewest fragments that have the same effect, from one bound to the next."""
    bounds = sorted({bound for t in tombstones for bound in (t.key, t.value or END_OF_KEYS)})
    fragments: list[Fragment] = []
    for start, end in pairwise(bounds):
        seq = newest_over(tombstones, start)
        if fragments and (fragments[-1].end, fragments[-1].seq) == (start, seq):
            fragments[-1] = Fragment(fragments[-1].start, end, seq)
        elif seq:
            fragments.append(Fragment(start, end, seq))
    return fragments


@given(commits=COMMITS, data=st.data())
def test_newest_over_a_key_counts_in_whatever_order_they_come(
    commits: list[list[KeyRange]], data: st.DataObject
) -> None:
    """In whatever order tombstones are added, the newest one over a key counts."""
    tombstones = tombstones_of(commits)
    arriving = data.draw(st.permutations(tombstones))
    cut = data.draw(st.integers(0, len(arriving)))
    found = NO_RANGE_TOMBSTONES.with_added(arriving[:cut]).with_added(arriving[cut:])
    for key in data.draw(st.lists(st.text("abcd", min_size=1, max_size=3).map(str.encode))):
        over = found.over(key)
        assert (over.seq if over else 0) == newest_over(tombstones, key)
        assert over is None or over.start <= key < over.end


@given(commits=COMMITS, data=st.data())
def test_fragments_are_the_fewest_and_all_accounted(
    commits: list[list[KeyRange]], data: st.DataObject
) -> None:
    """Neighbours with one sequence number are one fragment, and sizes count bounds and overhead."""
    tombstones = tombstones_of(commits)
    found = NO_RANGE_TOMBSTONES
    for each in data.draw(st.permutations(tombstones)):
        found = found.with_added([each])
    expected = fragments_of(tombstones)
    assert [found.over(fragment.start) for fragment in expected] == expected
    assert len(found) == len(expected)
    bounds_bytes = sum(len(f.start) + (0 if f.end == END_OF_KEYS else len(f.end)) for f in expected)
    assert found.size_bytes == len(expected) * FRAGMENT_BYTES + bounds_bytes


@given(
    commits=COMMITS,
    entries=st.lists(
        st.tuples(st.text("abcd", min_size=1, max_size=2).map(str.encode), st.integers(0, 9)),
        unique_by=lambda pair: pair[0],
    ),
    reverse=st.booleans(),
)
def test_what_is_older_than_its_tombstone_is_hidden(
    commits: list[list[KeyRange]],
    entries: list[tuple[bytes, int]],
    reverse: bool,  # noqa: FBT001 - a direction that is drawn
) -> None:
    """Entries below the number of the tombstone over them are hidden, those of its commit not."""
    tombstones = tombstones_of(commits)
    found = NO_RANGE_TOMBSTONES.with_added(tombstones)
    in_order = [Entry(key, seq, Kind.PUT) for key, seq in sorted(entries, reverse=reverse)]
    expected = [each for each in in_order if each.seq >= newest_over(tombstones, each.key)]
    assert found.visible(in_order) == expected
    assert [each for each in in_order if not found.hides(each)] == expected


def test_tombstone_without_an_end_hides_every_key_from_its_start_on() -> None:
    """An empty bound is none: the least and the greatest of all keys are deleted."""
    greatest = b"\xff" * 65_536
    some = NO_RANGE_TOMBSTONES.with_added([tombstone(b"b", b"", 5)])
    assert some.hides(Entry(greatest, 4, Kind.PUT))
    assert not some.hides(Entry(b"a\xff", 4, Kind.PUT))
    everything = NO_RANGE_TOMBSTONES.with_added([tombstone(b"", b"", 5)])
    assert everything.hides(Entry(b"\x00", 4, Kind.PUT))
    assert everything.hides(Entry(greatest, 4, Kind.PUT))
    assert not everything.hides(Entry(greatest, 5, Kind.PUT))


KEYS = st.binary(min_size=1, max_size=2)
KEY_BOUNDS = st.binary(max_size=2)


def contains(keys: KeyRange, key: bytes) -> bool:
    """Return whether the key is in the interval, by its definition."""
    return keys.start <= key and (not keys.end or key < keys.end)


@given(prefix=st.binary(min_size=1, max_size=3), key=st.binary(max_size=5))
def test_prefix_is_the_interval_up_to_its_end(prefix: bytes, key: bytes) -> None:
    """A key begins with a prefix exactly if it is in the range up to `prefix_end`."""
    assert key.startswith(prefix) == contains(KeyRange(prefix, prefix_end(prefix)), key)


@given(
    ranges=st.lists(
        st.builds(KeyRange, KEY_BOUNDS, KEY_BOUNDS).filter(lambda keys: not keys.is_empty),
        max_size=8,
    ),
    key=KEYS,
)
def test_coalesced_ranges_are_the_same_keys(ranges: list[KeyRange], key: bytes) -> None:
    """Coalesced ranges have the same keys, are in order, and do not even touch each other."""
    merged = coalesced(ranges)
    assert any(contains(keys, key) for keys in merged) == any(contains(r, key) for r in ranges)
    for before, after in pairwise(merged):
        assert before.end
        assert before.end < after.start
