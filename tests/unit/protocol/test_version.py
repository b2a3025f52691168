"""Tests of the levels of a manifest: their order, and the SSTs that can hold a key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.protocol.entry import KeyRange
from shalekv.protocol.manifest import (
    SYSTEM_LEVEL,
    LevelSize,
    Manifest,
    SortedRun,
    Version,
    most_over_one_key,
    overlaps,
    read_amplification,
    space_amplification,
    total_bytes,
    upper_bound,
)
from shalekv.protocol.sst_table import SstInfo, SstTable
from tests.kit.manifests import some_info


def sst(number: int, level: int, first: bytes, last: bytes, max_seq: int = 1) -> SstInfo:
    """Return an SST with these keys; an empty `last` is no bound."""
    sst_id = bytes(15) + bytes([number])
    return SstInfo(sst_id, level, first, last, 0, 0, 8, 8, 1, max_seq, 1, 0, 100, 1)


def version_of(*infos: SstInfo) -> Version:
    """Return the version of a manifest that lists these SSTs in this order."""
    manifest = Manifest(
        database_id=bytes(16),
        manifest_id=7,
        write_id=bytes(16),
        wal_id_last_compacted=5,
        last_compacted_seq=60,
        leveled_ssts=SstTable.from_infos(infos),
    )
    return Version.of(manifest)


def numbers(infos: Iterable[SstInfo]) -> list[int]:
    return [info.id[-1] for info in infos]


def test_levels_are_put_in_the_order_in_which_they_are_read() -> None:
    """L0 and the system level are newest first and runs by key, whatever order the manifest has."""
    version = version_of(
        sst(1, 3, b"a", b"z"),
        sst(2, 0, b"a", b"z", max_seq=10),
        sst(3, 1, b"m", b"n"),
        sst(4, SYSTEM_LEVEL, b"a", b"b", max_seq=10),
        sst(5, 0, b"a", b"z", max_seq=30),
        sst(6, 1, b"c", b"d"),
        sst(7, SYSTEM_LEVEL, b"a", b"b", max_seq=20),
        sst(8, 0, b"a", b"z", max_seq=20),
    )
    assert (version.manifest_id, version.wal_id, version.last_seq) == (7, 5, 60)
    assert numbers(version.l0) == [5, 8, 2]
    assert [(run.level, numbers(run.ssts)) for run in version.runs] == [(1, [6, 3]), (3, [1])]
    assert numbers(version.system) == [7, 4]
    assert version.runs[0].size_bytes == 200


def test_sources_of_a_key_come_newest_first() -> None:
    """The sources of a key are SSTs of L0 that cover it, then at most one SST of each run."""
    version = version_of(
        sst(1, 0, b"a", b"c", max_seq=10),
        sst(2, 0, b"b", b"d", max_seq=20),
        sst(3, 1, b"a", b"b"),
        sst(4, 1, b"d", b"e"),
        sst(5, 2, b"b", b""),
        sst(6, SYSTEM_LEVEL, b"a", b"z"),
    )
    expected = {b"a": [1, 3], b"b": [2, 1, 3, 5], b"c": [2, 1, 5], b"d": [2, 4, 5], b"zz": [5]}
    assert {key: numbers(version.sources_of(key)) for key in expected} == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((b"a", b"m"), (b"c", b"z")),
        ((b"a", b"z"), (b"c", b"d")),
        ((b"a", b""), (b"c", b"d")),
        ((b"a", b"b"), (b"a", b"c")),
        ((b"a", b"a"), (b"a", b"c")),
    ],
)
def test_run_whose_ssts_overlap_is_refused(
    before: tuple[bytes, bytes], after: tuple[bytes, bytes]
) -> None:
    """Two SSTs of one run with a common key are an error, which names the level."""
    with pytest.raises(ValueError, match=r"level 2: the SSTs .* overlap"):
        version_of(sst(1, 2, *after), sst(2, 2, *before))


def sources_in(run: SortedRun, key: bytes) -> list[SstInfo]:
    return Version(0, None, 0, (), [run], ()).sources_of(key)


def test_neighbours_may_share_the_end_of_a_range_tombstone() -> None:
    """The end of a range delete counts as a key of its SST, but the key there is the next SST's."""
    run = SortedRun.of(1, [sst(1, 1, b"a", b"c"), sst(2, 1, b"c", b"d")])
    assert [numbers(sources_in(run, key)) for key in (b"b", b"c", b"d")] == [[1], [2], [2]]
    assert numbers(run.overlapping(KeyRange(b"c", b""))) == [2]
    assert numbers(run.overlapping(KeyRange(b"b", b"c"))) == [1]
    assert numbers(run.overlapping(KeyRange(b"b", b"cc"))) == [1, 2]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (b"", b"", True),
        (b"", b"b", False),
        (b"", b"bb", True),
        (b"d", b"", True),
        (b"da", b"", False),
        (b"c", b"ca", True),
    ],
)
def test_both_ends_of_an_sst_are_keys_and_that_of_a_range_is_not(
    start: bytes, end: bytes, *, expected: bool
) -> None:
    """Both ends of an SST belong to it, and the end of a range does not belong to the range."""
    assert overlaps(sst(1, 1, b"b", b"d"), KeyRange(start, end)) is expected


LETTERS = b"abcdefghijkl"
KEYS = st.sampled_from([bytes([letter]) for letter in LETTERS] + [b""])


@given(
    bounds=st.sets(st.sampled_from(LETTERS)).map(sorted),
    is_unbounded=st.booleans(),
    start=KEYS,
    end=KEYS,
)
def test_run_finds_what_a_linear_search_finds(
    bounds: list[int], start: bytes, end: bytes, *, is_unbounded: bool
) -> None:
    """Bisection finds the same SSTs for a key and for a range as a search of all SSTs."""
    edges = [bytes([letter]) for letter in bounds]
    infos = [
        sst(number, 1, first, last)
        for number, (first, last) in enumerate(zip(edges[::2], edges[1::2], strict=False))
    ]
    if is_unbounded and len(edges) % 2:
        infos.append(sst(99, 1, edges[-1], b""))
    run = SortedRun.of(1, infos[::-1])
    for letter in LETTERS:
        key = bytes([letter])
        one = [info for info in infos if info.first_key <= key <= upper_bound(info)]
        assert sources_in(run, key) == one
    if not end or start < end:
        keys = KeyRange(start, end)
        assert [*run.overlapping(keys)] == [info for info in infos if overlaps(info, keys)]


def sizes(**levels: int) -> list[LevelSize]:
    """Return levels by name, each with so many bytes in two SSTs."""
    return [LevelSize(int(name[1:]), 2, bytes_, 0, 0) for name, bytes_ in levels.items()]


@pytest.mark.parametrize(
    ("levels", "space", "reads"),
    [
        ({}, 0.0, 0),
        ({"L0": 10}, 1.0, 2),
        ({"L0": 10, "L6": 90, "L7": 100}, 2.0, 4),
        ({"L7": 100, f"L{SYSTEM_LEVEL}": 900}, 1.0, 1),
        ({f"L{SYSTEM_LEVEL}": 900}, 0.0, 0),
    ],
)
def test_amplification(levels: dict[str, int], space: float, reads: int) -> None:
    """Idempotency records count in the sum of bytes, and not in the amplifications."""
    found = sizes(**levels)
    assert (space_amplification(found), read_amplification(found)) == (space, reads)
    assert total_bytes(found) == sum(levels.values())


keys = st.binary(min_size=1, max_size=2)
ranges = st.tuples(keys, keys | st.just(b"")).filter(lambda pair: not pair[1] or pair[0] <= pair[1])


@given(st.lists(ranges, max_size=8))
def test_most_over_one_key(bounds: list[tuple[bytes, bytes]]) -> None:
    """The greatest overlap is at the first key of one of the SSTs."""
    infos = [
        replace(some_info(number), first_key=first, last_key=last)
        for number, (first, last) in enumerate(bounds)
    ]
    expected = max(
        (
            sum(info.first_key <= other.first_key <= upper_bound(info) for info in infos)
            for other in infos
        ),
        default=0,
    )
    assert most_over_one_key(infos) == expected
