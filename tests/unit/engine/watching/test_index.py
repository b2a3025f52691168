"""The index of ranges, against a model that looks at every range."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.core.key_range import KeyRange, prefix_end
from shalekv.engine.watching.index import LENGTHS_MAX, RangeIndex

SEEDS = range(20)
STEPS = 400
ALPHABET = b"\x00ab\xff"
MANY = 10_000


def some_key(random: Random, most: int = 4) -> bytes:
    """A short key of few letters, so that much of it meets."""
    return bytes(random.choices(ALPHABET, k=random.randint(1, most)))


def some_range(random: Random) -> KeyRange:
    """A prefix, a key, a half-open or a whole range; never an empty one."""
    kind = random.randrange(6)
    key = some_key(random)
    if kind == 0:
        return KeyRange(key, prefix_end(key))
    if kind == 1:
        return KeyRange(key, key + b"\0")
    if kind == 2:
        return KeyRange(b"", b"")
    if kind == 3:
        return KeyRange(key, b"")
    if kind == 4:
        return KeyRange(b"", key)
    other = some_key(random)
    start, end = min(key, other), max(key, other)
    return KeyRange(start, end) if start < end else KeyRange(start, b"")


def contains(keys: KeyRange, key: bytes) -> bool:
    return keys.start <= key and (not keys.end or key < keys.end)


def overlaps(keys: KeyRange, start: bytes, end: bytes) -> bool:
    return (not keys.end or start < keys.end) and (not end or keys.start < end)


@pytest.mark.parametrize("seed", SEEDS)
def test_index_finds_what_a_look_at_every_range_finds(seed: int) -> None:
    """Through random additions and removals, both queries find exactly what the model finds."""
    random = Random(seed)
    index: RangeIndex[KeyRange] = RangeIndex()
    model: set[KeyRange] = set()
    for _ in range(STEPS):
        keys = some_range(random)
        if keys in model:
            index.remove(keys)
            model.remove(keys)
        else:
            index.add(keys, keys)
            model.add(keys)
        assert len(index) == len(model)
        key = some_key(random)
        found = index.matching(key)
        assert sorted(found) == sorted(each for each in model if contains(each, key))
        deleted = some_range(random)
        met = index.overlapping(deleted.start, deleted.end)
        assert sorted(met) == sorted(each for each in model if overlaps(each, *deleted))


def test_prefixes_of_many_lengths_are_all_found() -> None:
    """Prefixes beyond the lengths that are looked up one by one are found like the others."""
    index: RangeIndex[int] = RangeIndex()
    lengths = range(1, 3 * LENGTHS_MAX)
    for length in lengths:
        index.add(KeyRange(b"a" * length, prefix_end(b"a" * length)), length)
    assert sorted(index.matching(b"a" * lengths.stop)) == [*lengths]
    for length in lengths:
        index.remove(KeyRange(b"a" * length, prefix_end(b"a" * length)))
    assert index.matching(b"a" * lengths.stop) == []


def costs(index: RangeIndex[int], keys: list[bytes]) -> int:
    before = index.probes
    for key in keys:
        index.matching(key)
    return index.probes - before


def test_a_change_costs_a_logarithm_among_many_ranges_that_it_does_not_match() -> None:
    """Ten thousand ranges of any shape cost some twenty nodes for a key, not ten thousand."""
    index: RangeIndex[int] = RangeIndex()
    for number in range(MANY):
        index.add(KeyRange(b"%06d" % (2 * number), b"%06d5" % (2 * number)), number)
    keys = [b"%06d" % (2 * number + 1) for number in range(0, MANY, 100)]
    assert not any(index.matching(key) for key in keys)
    assert costs(index, keys) < 60 * len(keys)


def test_a_range_delete_costs_what_it_meets() -> None:
    """A deleted range that meets two of ten thousand watched ranges costs little more than two."""
    index: RangeIndex[int] = RangeIndex()
    for number in range(MANY):
        prefix = b"%06d" % number
        index.add(KeyRange(prefix, prefix_end(prefix)), number)
    before = index.probes
    assert sorted(index.overlapping(b"0005000", b"000502")) == [500, 501]
    assert index.probes - before < 100
