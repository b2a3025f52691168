"""A version of the levels, with loads and memory above it, answers reads as its history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, KeyRange, Kind
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.sst_table import SstTable
from shalekv.read.lookup import UNREAD, find, find_many, may_hold
from shalekv.read.scan import scan_slices
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import LoadedVersion, LoadPin, PinnedVersion, ReadView
from tests.kit.engine.levels import Levels, add_run
from tests.kit.inline_runtime import gathered

# Keys are not empty; bounds may be. There are few, so that versions, neighbours and bounds often
# coincide.
KEYS = [*(bytes([letter]) for letter in b"\x00abcdefgh"), b"a\x00", b"b\xff", b"\xff\xff"]
BOUNDS = [b"", *KEYS, b"cc", b"zz"]
REQUESTED = sorted({*KEYS, *BOUNDS, b"absent", b"z"})
LEVELS = (1, 2, 5)
NOW_MS = 3

# Changes of a key or of a range by a commit: all its entries get one sequence number.
changes = st.one_of(
    st.builds(
        Entry,
        st.sampled_from(KEYS),
        st.just(0),
        st.just(Kind.PUT),
        st.binary(max_size=12),
        st.sampled_from([0, 0, 2, 2**62]),
    ),
    st.sampled_from(KEYS).map(lambda key: Entry(key, 0, Kind.TOMBSTONE)),
    st.tuples(st.sampled_from(BOUNDS), st.sampled_from([*BOUNDS, b""]))
    .filter(lambda bounds: not bounds[1] or bounds[0] < bounds[1])
    .map(lambda bounds: Entry(bounds[0], 0, Kind.RANGE_TOMBSTONE, bounds[1])),
)
commits = st.lists(st.lists(changes, min_size=1, max_size=4), max_size=5)
loaded_keys = st.dictionaries(
    st.sampled_from(KEYS), st.none() | st.binary(max_size=6), min_size=1, max_size=6
)
key_ranges = st.builds(KeyRange, st.sampled_from(BOUNDS), st.sampled_from([*BOUNDS, b""])).filter(
    lambda keys: not keys.is_empty
)

Commits = Sequence[Sequence[Entry]]


@dataclass(frozen=True, slots=True)
class Layers:
    """The parts of a history, and how it is stored."""

    runs: Sequence[Commits]  # of the levels, deepest first
    l0: Sequence[Commits]  # oldest first
    loads: Sequence[tuple[Commits, dict[bytes, bytes | None]]]  # with the commits before each
    newest: Commits  # in memory after the last load
    run_cuts: Sequence[bytes]  # where the runs are cut into SSTs
    files: int  # of each load
    block_bytes: int
    filter_bits: float | None
    block_cache_bytes: int


layers = st.builds(
    Layers,
    st.lists(commits, min_size=len(LEVELS), max_size=len(LEVELS)),
    st.lists(commits, max_size=4),
    st.lists(st.tuples(commits, loaded_keys), max_size=2),
    commits,
    st.lists(st.sampled_from(BOUNDS[1:]), unique=True, max_size=4).map(sorted),
    st.integers(1, 3),
    st.sampled_from([1, 20, 10_000]),
    st.sampled_from([None, 1.0, 10.0]),
    st.sampled_from([0, 3_000, 1 << 20]),
)


class History:
    """A drawn history as it is read, and all its entries by their sequence numbers."""

    def __init__(self, drawn: Layers) -> None:
        self.drawn = drawn
        self.seq = 0
        self.entries: list[Entry] = []
        self.levels = Levels()
        for level, part in zip(reversed(LEVELS), drawn.runs, strict=True):
            entries = self._numbered(part)
            newest = newest_of(entries)
            points = [newest[key] for key in sorted(newest)]
            self._add_run(level, points, ranges_of(entries))
        for part in drawn.l0:
            entries = self._numbered(part)
            points = sorted(points_of(entries), key=lambda entry: (entry.key, -entry.seq))
            ranges = {(entry.key, entry.seq): entry for entry in ranges_of(entries)}
            ordered = sorted(ranges.values(), key=lambda entry: (entry.key, -entry.seq))
            if entries:
                self._add(points, ordered)
        self.version = self.levels.version()
        self.ssts = self.levels.open(
            block_cache_bytes=drawn.block_cache_bytes, scan_ahead_bytes_max=262_144
        )
        self.below = self.expected()  # the contents of the levels
        self.held = PinnedVersion(self.version, self.ssts, b"s" * 16)
        for before, loaded in drawn.loads:
            memory = self._memory(before)
            self.held = LoadedVersion(self._load(loaded), memory, self.held, LoadPin(b"p" * 16))
        newest_memory = self._memory(drawn.newest)
        self.view = ReadView(
            self.seq, 0, newest_memory.runs, newest_memory.range_tombstones, self.held
        )

    def expected(self) -> dict[bytes, Entry]:
        """Return the newest version of each key so far that no range delete hides."""
        tombstones = NO_RANGE_TOMBSTONES.with_added(ranges_of(self.entries))
        found = newest_of(self.entries)
        return {key: entry for key, entry in found.items() if not tombstones.hides(entry)}

    def _numbered(self, part: Commits) -> list[Entry]:
        """Return the entries of the next commits; the last change of a key in a commit counts."""
        found: list[Entry] = []
        for commit in part:
            self.seq += 1
            last = {(entry.kind is Kind.RANGE_TOMBSTONE, entry.key): entry for entry in commit}
            found += [entry._replace(seq=self.seq) for entry in last.values()]
        self.entries += found
        return found

    def _add_run(self, level: int, points: Sequence[Entry], ranges: Sequence[Entry]) -> None:
        add_run(
            self.levels,
            level,
            points,
            ranges,
            cuts=self.drawn.run_cuts,
            block_bytes=self.drawn.block_bytes,
            filter_bits=self.drawn.filter_bits,
        )

    def _add(self, points: Sequence[Entry], ranges: Sequence[Entry]) -> None:
        bits = self.drawn.filter_bits
        self.levels.add(0, points, ranges, block_bytes=self.drawn.block_bytes, filter_bits=bits)

    def _memory(self, part: Commits) -> ReadView:
        view = ReadView(self.seq, 0, ())
        for commit in part:
            entries = self._numbered([commit])
            run = MemoryRun.from_newest(
                newest_of(entries), max_seq=self.seq, range_tombstones=ranges_of(entries)
            )
            view = view.with_newer([run])
        return view

    def _load(self, loaded: dict[bytes, bytes | None]) -> CommittedLoad:
        entries = [
            Entry(key, 0, Kind.TOMBSTONE if value is None else Kind.PUT, value or b"")
            for key, value in sorted(loaded.items())
        ]
        self.seq += 1
        self.entries += [entry._replace(seq=self.seq) for entry in entries]
        each = -(-len(entries) // self.drawn.files)
        infos = [
            self.levels.add(0, entries[at : at + each], block_bytes=8)
            for at in range(0, len(entries), each)
        ]
        return CommittedLoad("load", SstTable.from_infos(infos), self.seq, 0)


def points_of(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.kind is not Kind.RANGE_TOMBSTONE]


def ranges_of(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.kind is Kind.RANGE_TOMBSTONE]


def newest_of(entries: Sequence[Entry]) -> dict[bytes, Entry]:
    return {entry.key: entry for entry in sorted(points_of(entries), key=lambda entry: entry.seq)}


def value_of(entry: Entry | None) -> bytes | None:
    return entry.value if entry is not None and entry.kind is Kind.PUT else None


@settings(max_examples=40, deadline=None)
@given(layers)
def test_finding_one_or_many(drawn: Layers) -> None:
    """A key is found alone and among others as its newest version that nothing hides."""

    async def check() -> None:
        history = History(drawn)
        ssts, version, below = history.ssts, history.version, history.below
        assert await find_many(ssts, version, [*REQUESTED, *REQUESTED]) == below
        found = {key: await find(ssts, version, key) for key in REQUESTED}
        assert {key: entry for key, entry in found.items() if entry is not None} == below
        assert all(may_hold(ssts, version, key) for key in below)
        expected = {key: value_of(entry) for key, entry in history.expected().items()}
        left = [key for key in REQUESTED if history.view.get(key) is None]
        many = await history.held.find_many(left)
        for key in REQUESTED:
            entry = history.view.get(key) or await history.held.find(key)
            assert value_of(entry) == expected.get(key), key
            if value_of(entry) is not None:
                assert history.view.get(key) or history.held.may_hold(key)
            if key in left:
                assert value_of(many.get(key)) == expected.get(key)
            cached = history.held.find_now(key)
            assert cached is UNREAD or cached == await history.held.find(key)

    asyncio.run(check())


@settings(max_examples=60, deadline=None)
@given(layers, key_ranges, st.sampled_from([False, True]))
def test_scanning(drawn: Layers, keys: KeyRange, reverse: bool) -> None:  # noqa: FBT001
    """A scan shows what lookups find, each key once, in both directions."""
    history = History(drawn)
    slices = scan_slices(
        history.view, start=keys.start, end=keys.end, reverse=reverse, now_ms=NOW_MS
    )
    found = [entry for part in asyncio.run(gathered(slices)) for entry in part]
    assert found == [
        entry
        for key, entry in sorted(history.expected().items(), reverse=reverse)
        if keys.start <= key and (not keys.end or key < keys.end) and entry.is_visible(NOW_MS)
    ]


def test_a_version_below_lives_as_long_as_the_load_above_it() -> None:
    """A loaded version keeps the pin of its files and the version of the manifest below it."""
    loads: list[tuple[Commits, dict[bytes, bytes | None]]]
    loads = [([], {b"a": b"1"}), ([], {b"b": b"2"})]
    held = History(Layers([[], [], []], [], loads, [], [], 1, 20, 10.0, 0)).held
    assert isinstance(held, LoadedVersion)
    assert held.pin is not None
    below = held.below
    assert isinstance(below, LoadedVersion)
    assert held.without_loads is below.without_loads is below.below
    assert held.snapshot_id == below.below.snapshot_id
    assert not held.version.is_empty
    assert below.below.version.is_empty


def test_a_range_delete_that_is_compacted_hides_nothing_that_came_after() -> None:
    """A range delete left in memory below a load hides no newer put, which only the levels have."""
    levels = Levels()
    deleted = Entry(b"a", 1, Kind.RANGE_TOMBSTONE, b"z")
    after = Entry(b"k", 2, Kind.PUT, b"after")
    levels.add(0, [after], [deleted])
    held = PinnedVersion(replace(levels.version(), last_seq=2), levels.open(), b"s" * 16)
    memory = ReadView(2, 0, (), NO_RANGE_TOMBSTONES.with_added([deleted]))
    info = levels.add(0, [Entry(b"x", 0, Kind.PUT, b"loaded")])
    load = CommittedLoad("load", SstTable.from_infos([info]), 3, 0)
    version = LoadedVersion(load, memory, held)
    assert asyncio.run(version.find(b"k")) == after
    assert asyncio.run(version.find_many([b"k"])) == {b"k": after}
