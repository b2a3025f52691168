"""A load between what was in memory and what came after reads as one history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.loads import CommittedLoad
from shalekv.core.range_tombstones import NONE
from shalekv.core.sst_table import SstTable
from shalekv.engine.levels.held_tree import HeldTree
from shalekv.engine.levels.loaded_tree import LoadedTree, Pin
from shalekv.engine.scan import scan_slices
from shalekv.engine.sorted_runs import Run
from shalekv.engine.view import View
from tests.kit.engine.trees import Levels
from tests.kit.inline_runtime import gathered
from tests.unit.engine.levels.histories import KEYS, changes, key_ranges, newest_of, ranges_of

NOW_MS = 3

# What a load holds: each key once, no range deletes.
loaded_keys = st.dictionaries(
    st.sampled_from(KEYS), st.none() | st.binary(max_size=6), min_size=1, max_size=6
)
# The history of a database: commits into the levels, then into memory, with loads between.
stretches = st.lists(st.lists(changes, min_size=1, max_size=3), max_size=4)


@dataclass(frozen=True, slots=True)
class Layers:
    """Commits of the levels, and for each load those before it that are in memory."""

    levels: Sequence[Sequence[Entry]]
    memory: Sequence[tuple[Sequence[Sequence[Entry]], dict[bytes, bytes | None]]]
    newest: Sequence[Sequence[Entry]]  # in memory after the last load
    files: int  # of each load


layers = st.builds(
    Layers,
    stretches,
    st.lists(st.tuples(stretches, loaded_keys), min_size=1, max_size=3),
    stretches,
    st.integers(1, 3),
)


class Built:
    """What reads find, and all entries that count, by their numbers."""

    def __init__(self, drawn: Layers) -> None:
        self.seq = 0
        self.history: list[Entry] = []
        self.levels = Levels()
        for commit in drawn.levels:
            entries = self._commit(commit)
            points = sorted(e for e in entries if e.kind is not Kind.RANGE_TOMBSTONE)
            ranges = sorted(e for e in entries if e.kind is Kind.RANGE_TOMBSTONE)
            self.levels.add(0, points, ranges, block_bytes=16)
        tree = self.levels.tree()
        held = HeldTree(tree, self.levels.open(), b"s" * 16)
        for commits, loaded in drawn.memory:
            memory = self._memory(commits)
            held = LoadedTree(self._load(loaded, drawn.files), memory, held, Pin(b"p" * 16))
        self.held = held
        newest = self._memory(drawn.newest)
        self.view = View(self.seq, 0, newest.runs, newest.range_tombstones, held)

    def expected(self) -> dict[bytes, Entry]:
        """The newest version of each key that no range delete hides."""
        tombstones = NONE.with_added(ranges_of(self.history))
        found = newest_of(self.history)
        return {key: entry for key, entry in found.items() if not tombstones.hides(entry)}

    def _commit(self, commit: Sequence[Entry]) -> list[Entry]:
        """The entries of the next commit; of each key the last change counts."""
        self.seq += 1
        last = {(entry.kind is Kind.RANGE_TOMBSTONE, entry.key): entry for entry in commit}
        entries = [entry._replace(seq=self.seq) for entry in last.values()]
        self.history += entries
        return entries

    def _memory(self, commits: Sequence[Sequence[Entry]]) -> View:
        view = View(self.seq, 0, ())
        for commit in commits:
            entries = self._commit(commit)
            ranges = ranges_of(entries)
            points = newest_of(entries)
            run = Run.from_newest(points, max_seq=self.seq, range_tombstones=ranges)
            view = view.below([run])
        return view

    def _load(self, loaded: dict[bytes, bytes | None], files: int) -> CommittedLoad:
        """A load that stands in SSTs without numbers."""
        entries = [
            Entry(key, 0, Kind.TOMBSTONE if value is None else Kind.PUT, value or b"")
            for key, value in sorted(loaded.items())
        ]
        self.seq += 1
        self.history += [entry._replace(seq=self.seq) for entry in entries]
        each = -(-len(entries) // files)
        infos = [
            self.levels.add(0, entries[at : at + each], block_bytes=8)
            for at in range(0, len(entries), each)
        ]
        return CommittedLoad("load", SstTable.from_infos(infos), self.seq, 0)


@settings(max_examples=100, deadline=None)
@given(layers)
def test_keys_are_found_in_the_newest_layer(drawn: Layers) -> None:
    """A lookup finds of every key the version with the greatest number, wherever it stands."""
    built = Built(drawn)
    expected = built.expected()
    for key in KEYS:
        found = built.view.get(key) or asyncio.run(built.held.find(key))
        wanted = expected.get(key)
        assert _value(found) == _value(wanted), key
        if found is not None and found.kind is Kind.PUT:
            assert found == wanted
            assert built.view.get(key) or built.held.may_hold(key)
    left = [key for key in KEYS if built.view.get(key) is None]
    many = asyncio.run(built.held.find_many(left))
    assert {key: _value(many.get(key)) for key in left} == {
        key: _value(expected.get(key)) for key in left
    }


@settings(max_examples=100, deadline=None)
@given(layers, key_ranges, st.sampled_from([False, True]))
def test_scans_merge_all_layers(drawn: Layers, keys: KeyRange, reverse: bool) -> None:  # noqa: FBT001
    """A scan shows what lookups find, each key once, in both directions."""
    built = Built(drawn)
    slices = scan_slices(built.view, start=keys.start, end=keys.end, reverse=reverse, now_ms=NOW_MS)
    found = [entry for part in asyncio.run(gathered(slices)) for entry in part]
    expected = [
        entry
        for key, entry in sorted(built.expected().items(), reverse=reverse)
        if keys.start <= key and (not keys.end or key < keys.end) and entry.is_visible(NOW_MS)
    ]
    assert found == expected


def _value(entry: Entry | None) -> bytes | None:
    return entry.value if entry is not None and entry.kind is Kind.PUT else None


def test_a_tree_below_lives_as_long_as_the_load_above_it() -> None:
    """Who holds a loaded tree holds the pin of its files and the tree of the manifest below."""
    built = Built(Layers([], [([], {b"a": b"1"}), ([], {b"b": b"2"})], [], 1))
    assert isinstance(built.held, LoadedTree)
    assert built.held.pin is not None
    below = built.held.below
    assert isinstance(below, LoadedTree)
    assert built.held.base is below.base is below.below
    assert built.held.snapshot_id == below.below.snapshot_id
    assert not built.held.tree.is_empty
    assert below.below.tree.is_empty


def test_a_range_delete_that_is_compacted_hides_nothing_that_came_after() -> None:
    """Memory below a load may have let go of a put that the levels hold, and still have the range
    delete before it.
    """
    levels = Levels()
    deleted = Entry(b"a", 1, Kind.RANGE_TOMBSTONE, b"z")
    after = Entry(b"k", 2, Kind.PUT, b"after")
    levels.add(0, [after], [deleted])
    held = HeldTree(replace(levels.tree(), last_seq=2), levels.open(), b"s" * 16)
    memory = View(2, 0, (), NONE.with_added([deleted]))
    info = levels.add(0, [Entry(b"x", 0, Kind.PUT, b"loaded")])
    load = CommittedLoad("load", SstTable.from_infos([info]), 3, 0)
    tree = LoadedTree(load, memory, held)
    assert asyncio.run(tree.find(b"k")) == after
    assert asyncio.run(tree.find_many([b"k"])) == {b"k": after}
