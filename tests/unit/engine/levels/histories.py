"""Random histories of a few keys, the trees that they can end in, and what must be read there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import END_OF_KEYS, KeyRange
from shalekv.core.range_tombstones import NONE
from tests.kit.engine.trees import Levels, add_run, range_tombstone

# Keys are not empty; bounds may be. Few, so that versions, neighbours and bounds often meet.
KEYS = [*(bytes([letter]) for letter in b"\x00abcdefgh"), b"a\x00", b"b\xff", b"\xff\xff"]
BOUNDS = [b"", *KEYS, b"cc", b"zz"]
LEVELS = (1, 2, 5)

# What a commit does to a key, or to a range: all its entries get one sequence number.
changes = st.one_of(
    st.builds(
        Entry,
        st.sampled_from(KEYS),
        st.just(0),
        st.just(Kind.PUT),
        st.binary(max_size=12),
        st.sampled_from([0, 0, 5, 2**62]),
    ),
    st.sampled_from(KEYS).map(lambda key: Entry(key, 0, Kind.TOMBSTONE)),
    st.tuples(st.sampled_from(BOUNDS), st.sampled_from([*BOUNDS, b""]))
    .filter(lambda bounds: not bounds[1] or bounds[0] < bounds[1])
    .map(lambda bounds: Entry(bounds[0], 0, Kind.RANGE_TOMBSTONE, bounds[1])),
)
# Range deletes of later commits, or of some in the middle of a history.
newer_ranges = st.lists(
    st.builds(
        range_tombstone,
        st.sampled_from(BOUNDS),
        st.sampled_from([*BOUNDS[1:], END_OF_KEYS]),
        st.sampled_from([5, 10, 50, 60]),
    ).filter(lambda entry: not entry.value or entry.key < entry.value),
    max_size=4,
)
commits = st.lists(st.lists(changes, min_size=1, max_size=4), min_size=8, max_size=25)
key_ranges = st.builds(KeyRange, st.sampled_from(BOUNDS), st.sampled_from([*BOUNDS, b""])).filter(
    lambda keys: not keys.is_empty
)


@dataclass(frozen=True, slots=True)
class History:
    """Entries from the oldest to the newest, and the numbers of commits at which sources begin."""

    commits: Sequence[Sequence[Entry]]
    cuts: Sequence[int]  # the first are those of the levels, deepest first; the rest cut L0
    run_cuts: Sequence[bytes]  # where the runs are cut into SSTs
    block_bytes: int
    filter_bits: float | None

    def build(self) -> Levels:
        """A tree of this history."""
        levels = Levels()
        bounds = [0, *sorted(self.cuts), len(self.commits)]
        parts = [self.entries(start, end) for start, end in pairwise(bounds)]
        options: dict[str, Any] = {
            "block_bytes": self.block_bytes,
            "filter_bits": self.filter_bits,
        }
        for level, part in zip(reversed(LEVELS), parts, strict=False):
            newest = newest_of(part)
            points = [newest[key] for key in sorted(newest)]
            add_run(levels, level, points, ranges_of(part), cuts=self.run_cuts, **options)
        for part in parts[len(LEVELS) :]:
            points = sorted(points_of(part), key=lambda entry: (entry.key, -entry.seq))
            ranges = sorted(set(ranges_of(part)), key=lambda entry: (entry.key, -entry.seq))
            ranges = [*{(entry.key, entry.seq): entry for entry in ranges}.values()]
            if points or ranges:
                levels.add(0, points, ranges, **options)
        return levels

    def entries(self, start: int = 0, end: int | None = None) -> list[Entry]:
        """The entries of some commits; of each key the last change of a commit counts."""
        found: list[Entry] = []
        for seq, commit in enumerate(self.commits[start:end], start + 1):
            last = {(entry.kind is Kind.RANGE_TOMBSTONE, entry.key): entry for entry in commit}
            found += [entry._replace(seq=seq) for entry in last.values()]
        return found

    def expected(self) -> dict[bytes, Entry]:
        """What must be found: the newest version of each key, unless a range tombstone hides it."""
        entries = self.entries()
        tombstones = NONE.with_added(ranges_of(entries))
        newest = newest_of(entries)
        return {key: entry for key, entry in newest.items() if not tombstones.hides(entry)}


def points_of(entries: Sequence[Entry]) -> list[Entry]:
    """Without range tombstones."""
    return [entry for entry in entries if entry.kind is not Kind.RANGE_TOMBSTONE]


def ranges_of(entries: Sequence[Entry]) -> list[Entry]:
    """Only range tombstones."""
    return [entry for entry in entries if entry.kind is Kind.RANGE_TOMBSTONE]


def newest_of(entries: Sequence[Entry]) -> dict[bytes, Entry]:
    """The newest version of each key."""
    return {entry.key: entry for entry in sorted(points_of(entries), key=lambda entry: entry.seq)}


histories = st.builds(
    History,
    commits,
    st.lists(st.integers(0, 100), min_size=3, max_size=8, unique=True),
    st.lists(st.sampled_from(BOUNDS[1:]), unique=True, max_size=4).map(sorted),
    st.sampled_from([1, 20, 10_000]),
    st.sampled_from([None, 1.0, 10.0]),
).map(
    lambda history: History(
        history.commits,
        [cut * len(history.commits) // 100 for cut in history.cuts],
        history.run_cuts,
        history.block_bytes,
        history.filter_bits,
    )
)
