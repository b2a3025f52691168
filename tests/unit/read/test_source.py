"""Scans read each block once, a bounded amount ahead, only what they need: counted, not timed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import accumulate
from random import Random

import pytest

from shalekv.errors import StoreUnavailable
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Section
from shalekv.format.names import level_name
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, KeyRange, Kind, RangeTombstones
from shalekv.protocol.manifest import Version
from shalekv.read.source import (
    KEPT_BLOCKS_MAX,
    WINDOW_ROWS,
    LevelSource,
    MergeWindow,
    level_sources,
)
from shalekv.read.sst_reader import LevelSsts
from shalekv.settings.model import KIB
from tests.kit.engine.levels import Levels, add_run, range_tombstone

ALL = KeyRange(b"", b"")
COUNT = 3_000
BOTH = pytest.mark.parametrize("reverse", [False, True])


def key_of(number: int) -> bytes:
    return b"key%06d" % number


def entries_of(numbers: range, seq: int, *, value_bytes: int = 60) -> list[Entry]:
    random = Random(seq)
    return [
        Entry(key_of(number), seq, Kind.PUT, random.randbytes(value_bytes)) for number in numbers
    ]


@pytest.fixture(scope="module")
def all_levels() -> Levels:
    """Two overlapping L0 SSTs, one also with old versions, over three levels of many SSTs."""
    levels = Levels()
    levels.add(0, entries_of(range(0, COUNT, 50), 9), block_bytes=256)
    versions = [
        entry
        for pair in zip(entries_of(range(100, 200), 8), entries_of(range(100, 200), 7), strict=True)
        for entry in pair
    ]
    levels.add(0, versions, [range_tombstone(key_of(300), key_of(400), 8)], block_bytes=256)
    for level, step, ssts in ((1, 7, 2), (2, 3, 5), (4, 1, 11)):
        cuts = [key_of(COUNT * at // ssts) for at in range(1, ssts)]
        add_run(
            levels,
            level,
            entries_of(range(0, COUNT, step), 6 - level),
            cuts=cuts,
            block_bytes=256,
            codec=Codec.LZ4,
        )
    return levels


async def drain(
    ssts: LevelSsts, version: Version, keys: KeyRange = ALL, *, reverse: bool = False
) -> dict[bytes, Entry]:
    """Return all visible versions of a range, reading the sources one after the other."""
    newest: dict[bytes, Entry] = {}
    tombstones = NO_RANGE_TOMBSTONES
    for source in level_sources(ssts, version, keys, reverse=reverse):
        while (window := await source.next()) is not None:
            newest |= zip(window.run.keys, window.run.entries, strict=True)
            tombstones = tombstones.with_added(window.range_tombstones)
    return {key: entry for key, entry in newest.items() if not tombstones.hides(entry)}


async def windows(
    source: LevelSource, hidden: RangeTombstones = NO_RANGE_TOMBSTONES
) -> AsyncIterator[MergeWindow]:
    while (window := await source.next(hidden)) is not None:
        yield window


@pytest.mark.parametrize(
    ("block_cache_bytes", "reverse"), [(0, True), (20_000, False), (20_000, True), (1 << 26, False)]
)
async def test_a_scan_reads_each_block_once(
    all_levels: Levels,
    block_cache_bytes: int,
    reverse: bool,  # noqa: FBT001 - parameter
) -> None:
    """Over L0 and several levels every data block is read exactly once, in either direction."""
    ssts, version = all_levels.open(block_cache_bytes=block_cache_bytes), all_levels.version()
    all_levels.store.requests.clear()
    found = await drain(ssts, version, reverse=reverse)
    assert len(found) == COUNT - 100 + len(range(300, 400, 50))
    assert {found[key_of(number)].seq for number in range(101, 150)} == {8}
    expected = {
        (level_name(info.id), number): 1
        for info in all_levels.infos
        for number in range(len((await ssts.metadata(info)).index))
    }
    assert len(expected) > 500
    assert all_levels.block_reads() == expected
    assert ssts.counters.block_requests < len(expected) / 5


def wide() -> Levels:
    levels = Levels()
    levels.add(1, entries_of(range(400), 1, value_bytes=480), block_bytes=1)
    return levels


@BOTH
async def test_read_ahead_doubles_up_to_its_bound(*, reverse: bool) -> None:
    """A scan begins with one block and doubles, up to the setting."""
    levels = wide()
    ssts, version = levels.open(scan_ahead_bytes_max=24 * 20 * KIB), levels.version()
    await ssts.open_many(levels.infos)
    handles = [*(await ssts.metadata(levels.infos[0])).index]
    levels.store.requests.clear()
    await drain(ssts, version, reverse=reverse)
    lengths = [length for _, _, length in levels.store.reads]
    block_bytes = handles[0].length
    most = 20 * KIB // block_bytes
    counts = [length // block_bytes for length in lengths]
    assert counts[:6] == [1, 2, 4, 8, 16, min(32, most)]
    assert set(counts[6:-1]) == {most}
    assert max(lengths) <= 20 * KIB
    assert [*accumulate(counts)][-1] == len(handles)


async def test_a_long_scan_leaves_the_cache_alone() -> None:
    """Blocks cached by lookups stay through a scan of far more than the cache holds."""
    levels = wide()
    ssts, version = levels.open(block_cache_bytes=40_000), levels.version()
    opened = await ssts.metadata(levels.infos[0])
    hot = range(100, 110)
    for number in hot:
        await ssts.block(opened, number)
    assert len(await drain(ssts, version)) == 400
    assert all(ssts.cached_block(opened.info.id, number) is not None for number in hot)
    assert ssts.counters.block_evictions == 0
    kept = [number for number in range(100) if ssts.cached_block(opened.info.id, number)]
    assert len(kept) < 2 * KEPT_BLOCKS_MAX


@BOTH
async def test_only_what_is_in_the_range_is_read(all_levels: Levels, *, reverse: bool) -> None:
    """A short scan opens the SSTs of its range, and reads the few blocks that may hold its keys."""
    ssts, version = all_levels.open(), all_levels.version()
    all_levels.store.requests.clear()
    keys = KeyRange(key_of(1_500), key_of(1_510))
    found = await drain(ssts, version, keys, reverse=reverse)
    assert {*found} == {key_of(number) for number in range(1_500, 1_510)}
    assert ssts.counters.metadata_requests <= 5
    for name, number in all_levels.block_reads():
        index = all_levels.sst(name).index
        assert index.first_key(number) < keys.end
        points = index.blocks_of(Section.POINTS)
        assert number + 1 not in points or index.first_key(number + 1) > keys.start


@BOTH
async def test_what_is_hidden_whole_is_not_read(*, reverse: bool) -> None:
    """SSTs and blocks under a newer range tombstone are neither opened nor read."""
    levels = Levels()
    cuts = [key_of(number) for number in (1_000, 2_000, 3_000)]
    add_run(levels, 3, entries_of(range(4_000), 1), cuts=cuts, block_bytes=1_000)
    ssts, version = levels.open(scan_ahead_bytes_max=256 * KIB), levels.version()
    hidden = RangeTombstones().with_added([range_tombstone(key_of(500), key_of(3_500), 5)])
    (source,) = level_sources(ssts, version, ALL, reverse=reverse)
    keys = [key async for window in windows(source, hidden) for key in window.run.keys]
    assert {key_of(number) for number in (*range(500), *range(3_500, 4_000))} <= {*keys}
    opened = {name for name, _, _ in levels.store.reads}
    assert opened == {level_name(levels.infos[at].id) for at in (0, 3)}
    # 13 entries in a block; beside the visible ones, one request ahead was fetched.
    assert len(keys) < 1_000 + 150


async def test_windows_are_short() -> None:
    """A window has a bounded number of rows, however much was fetched."""
    levels = Levels()
    levels.add(1, entries_of(range(9_000), 1, value_bytes=0), block_bytes=1_000)
    ssts, version = levels.open(), levels.version()
    (source,) = level_sources(ssts, version, ALL, reverse=False)
    rows = [len(window.run.keys) async for window in windows(source)]
    assert sum(rows) == 9_000
    assert max(rows) <= WINDOW_ROWS
    assert len(rows) < 2 * 9_000 / WINDOW_ROWS + 10


@BOTH
async def test_an_interrupted_scan_goes_on_where_it_was(*, reverse: bool) -> None:
    """After a cancelled or failed read the next one returns the same keys and deletions."""
    levels = Levels()
    levels.add(0, entries_of(range(200), 1), [range_tombstone(b"a", b"b", 2)], block_bytes=100)
    ssts, version = levels.open(block_cache_bytes=0), levels.version()
    (source,) = level_sources(ssts, version, ALL, reverse=reverse)
    await ssts.metadata(levels.infos[0])
    received: list[MergeWindow] = []
    while True:
        levels.store.fail("get_range")
        try:
            window = await source.next()
        except StoreUnavailable:
            levels.gate.close()
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(source.next())
                await asyncio.sleep(0)
                call.cancel()
            levels.gate.open()
            window = await source.next()
        levels.store.before = levels.gate
        if window is None:
            break
        received.append(window)
    assert received[0].range_tombstones == [range_tombstone(b"a", b"b", 2)]
    keys = sorted(key for window in received for key in window.run.keys)
    assert keys == [key_of(number) for number in range(200)]
    assert ssts.counters.in_flight_bytes == 0


async def test_a_scan_does_not_hold_filters() -> None:
    """The metadata that a scan holds beside the caches is without the filter, its largest part."""
    levels = wide()
    ssts, version = levels.open(), levels.version()
    assert (await ssts.metadata(levels.infos[0])).filter is not None
    (source,) = level_sources(ssts, version, ALL, reverse=False)
    await source.next()
    assert source.opened is not None
    assert source.opened.filter is None
