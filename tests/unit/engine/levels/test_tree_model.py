"""Any tree, read in any way, answers as the history that it came from."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.entry import Entry
from shalekv.core.key_range import END_OF_KEYS, KeyRange
from shalekv.core.range_tombstones import NONE, RangeTombstones
from shalekv.core.tree import Tree, upper_bound
from shalekv.engine.levels.lookup import find, find_many, may_hold
from shalekv.engine.levels.source import TreeSource, tree_sources
from shalekv.engine.levels.ssts import LevelSsts
from tests.unit.engine.levels.histories import (
    BOUNDS,
    KEYS,
    History,
    histories,
    key_ranges,
    newer_ranges,
)

ASKED = sorted({*KEYS, *BOUNDS, b"absent", b"z"})
caches = st.fixed_dictionaries(
    {
        "block_cache_bytes": st.sampled_from([0, 3_000, 1 << 20]),
        "read_ahead_bytes_max": st.just(4096),
    }
)


@settings(max_examples=120, deadline=None)
@given(histories, caches)
def test_finding_one_or_many(history: History, cache: dict[str, int]) -> None:
    """A key is found alone and among others as its newest version that nothing hides."""

    async def trial() -> None:
        levels = history.build()
        ssts, tree = levels.open(**cache), levels.tree()
        expected = history.expected()
        assert await find_many(ssts, tree, [*ASKED, *ASKED]) == expected
        found = {key: await find(ssts, tree, key) for key in ASKED}
        assert {key: entry for key, entry in found.items() if entry is not None} == expected
        assert all(may_hold(ssts, tree, key) for key in expected)
        assert await find_many(ssts, tree, ASKED[::3]) == {
            key: entry for key, entry in expected.items() if key in ASKED[::3]
        }

    asyncio.run(trial())


@settings(max_examples=120, deadline=None)
@given(histories, caches, key_ranges, newer_ranges, st.booleans())
def test_scanning(
    history: History,
    cache: dict[str, int],
    keys: KeyRange,
    newer: list[Entry],
    reverse: bool,  # noqa: FBT001 - hypothesis passes it
) -> None:
    """The sources hold what must be found in a range, oldest first, window by window in order.

    Whoever knows the windows up to a key knows the range tombstones up to it. What newer range
    tombstones hide may be missing, and nothing else.
    """

    async def trial() -> None:
        levels = history.build()
        ssts, tree = levels.open(**cache), levels.tree()
        newest: dict[bytes, Entry] = {}
        hidden = tombstones = NONE.with_added(newer)
        for source in tree_sources(ssts, tree, keys, reverse=reverse):
            of_source, entries = await drained(source, keys, hidden, reverse=reverse)
            tombstones = tombstones.with_added(entries)
            for key, entry in of_source.items():
                assert key not in newest or newest[key].seq < entry.seq
            newest |= of_source
        visible = {key: entry for key, entry in newest.items() if not tombstones.hides(entry)}
        expected = history.expected().items()
        assert visible == {
            key: entry
            for key, entry in expected
            if keys.start <= key < (keys.end or END_OF_KEYS) and not hidden.hides(entry)
        }
        await check_tombstones_in_time(ssts, tree, keys, reverse=reverse)

    asyncio.run(trial())


async def drained(
    source: TreeSource, keys: KeyRange, hidden: RangeTombstones, *, reverse: bool
) -> tuple[dict[bytes, Entry], list[Entry]]:
    """All of a source, checked on the way: the newest entries, and the range tombstones."""
    newest: dict[bytes, Entry] = {}
    tombstones: list[Entry] = []
    last_key: bytes | None = None
    while (window := await source.next(hidden)) is not None:
        run = window.run
        assert [entry.key for entry in run.entries] == [*run.keys] == sorted({*run.keys})
        assert all(entry.seq <= run.max_seq for entry in run.entries)
        assert all(keys.start <= key < (keys.end or END_OF_KEYS) for key in run.keys)
        tombstones += window.range_tombstones
        if run.keys:
            first, last = run.keys[0], run.keys[-1]
            assert last_key is None or (last < last_key if reverse else first > last_key)
            last_key = first if reverse else last
        newest |= zip(run.keys, run.entries, strict=True)
    assert await source.next(hidden) is None
    return newest, tombstones


async def check_tombstones_in_time(
    ssts: LevelSsts, tree: Tree, keys: KeyRange, *, reverse: bool
) -> None:
    """What hides a key is told with the windows up to that key, or before."""
    asked = [key for key in ASKED if keys.start <= key < (keys.end or END_OF_KEYS)]
    infos = [[*run.ssts] for run in reversed(tree.runs)] + [[i] for i in reversed(tree.l0)]
    whole: dict[bytes, RangeTombstones] = {}
    for info in (info for of_source in infos for info in of_source):
        whole[info.id] = (await ssts.metadata(info, with_filter=False)).range_tombstones
    overlapping = [
        [
            i
            for i in of_source
            if upper_bound(i) >= keys.start and i.first_key < (keys.end or END_OF_KEYS)
        ]
        for of_source in infos
    ]
    sources = tree_sources(ssts, tree, keys, reverse=reverse)
    for source, of_source in zip(sources, filter(None, overlapping), strict=True):
        told = NONE
        while (window := await source.next()) is not None:
            told = told.with_added(window.range_tombstones)
            if not window.run.keys:
                continue
            if reverse:
                known = [key for key in asked if key >= window.run.keys[0]]
            else:
                known = [key for key in asked if key <= window.run.keys[-1]]
            check_all_told(told, known, [whole[info.id] for info in of_source])
        check_all_told(told, asked, [whole[info.id] for info in of_source])


def check_all_told(told: RangeTombstones, keys: list[bytes], whole: list[RangeTombstones]) -> None:
    """Each key is hidden by what was told as it is by all range tombstones of the source."""
    for key in keys:
        fragments = [fragment for each in whole if (fragment := each.over(key)) is not None]
        fragment = told.over(key)
        assert (fragment.seq if fragment else 0) == max((f.seq for f in fragments), default=0)
