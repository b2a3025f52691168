"""SSTs are read with few requests, shared by concurrent callers, and nothing damaged is served."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.errors import CorruptObject
from shalekv.format.block_frame import Codec
from shalekv.format.names import level_name
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings.model import MIB
from tests.kit.engine.levels import Levels, range_tombstone
from tests.kit.engine.running_log import quiesce

POINTS = [Entry(b"%03d" % key, key + 1, Kind.PUT, b"v" * 30) for key in range(100)]
RANGES = [range_tombstone(b"%03d" % key, b"%03d" % (key + 5), 500) for key in range(0, 90, 10)]


def points_only() -> tuple[Levels, SstInfo]:
    levels = Levels()
    return levels, levels.add(1, POINTS, block_bytes=200)


async def test_metadata_comes_with_one_request() -> None:
    """Footer, index and filter come with one request, which is not repeated."""
    levels, info = points_only()
    ssts = levels.open()
    opened = await ssts.metadata(info)
    assert opened.filter is not None
    assert len(opened.index) > 5
    assert await ssts.metadata(info) is opened
    assert levels.store.reads == [
        (level_name(info.id), info.filter_offset, info.size_bytes - info.filter_offset)
    ]
    counters = ssts.counters
    assert (counters.metadata_hits, counters.metadata_misses) == (1, 1)
    assert counters.metadata_requests == 1
    assert counters.metadata_fetched_bytes == info.size_bytes - info.filter_offset


async def test_a_filter_that_is_not_needed_is_not_read() -> None:
    """A caller that needs no filter reads fewer bytes; the filter is then read alone, once."""
    levels = Levels()
    info = levels.add(1, POINTS, RANGES, block_bytes=200)
    ssts = levels.open()
    bare = await ssts.metadata(info, with_filter=False)
    assert bare.filter is None
    assert await ssts.metadata(info, with_filter=False) is bare
    levels.store.requests.clear()
    whole = await ssts.metadata(info)
    assert whole.filter is not None
    assert (whole.index, whole.range_tombstones) == (bare.index, bare.range_tombstones)
    assert levels.store.reads == [(level_name(info.id), info.filter_offset, info.filter_len)]


async def test_concurrent_callers_share_requests() -> None:
    """Concurrent reads of metadata and of a block send one request each."""
    levels, info = points_only()
    ssts = levels.open(block_cache_bytes=0)
    levels.gate.close()
    async with asyncio.TaskGroup() as tasks:
        openings = [tasks.create_task(ssts.metadata(info)) for _ in range(5)]
        await quiesce()
        bare = [tasks.create_task(ssts.metadata(info, with_filter=False)) for _ in range(5)]
        await quiesce()
        levels.gate.open()
    assert len({id(task.result()) for task in (*openings, *bare)}) == len(levels.store.reads) == 1
    opened = openings[0].result()
    levels.gate.close()
    async with asyncio.TaskGroup() as tasks:
        blocks = [tasks.create_task(ssts.block(opened, 3)) for _ in range(5)]
        await quiesce()
        levels.gate.open()
    assert len({id(task.result()) for task in blocks}) == ssts.counters.block_requests == 1


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
async def test_neighbours_come_with_one_request(codec: Codec) -> None:
    """Adjacent blocks come with one request for the missing ones, and are those of the SST."""
    levels = Levels()
    info = levels.add(1, POINTS, block_bytes=200, codec=codec)
    ssts = levels.open()
    opened = await ssts.metadata(info)
    whole = levels.sst(level_name(info.id))
    expected = [whole.decode_block(number) for number in range(len(whole.index))]
    await ssts.block(opened, 1)
    await ssts.block(opened, 5)
    levels.store.requests.clear()
    assert await ssts.blocks(opened, range(1, 6), keep=False) == expected[1:6]
    start, end = opened.index[2].offset, opened.index[4].offset + opened.index[4].length
    assert levels.store.reads == [(level_name(info.id), start, end - start)]
    assert [ssts.cached_block(info.id, number) is None for number in range(7)] == [
        number not in (1, 5) for number in range(7)
    ]
    assert await ssts.blocks(opened, range(7), keep=True) == expected[:7]
    assert len(levels.store.reads) == 2
    assert await ssts.blocks(opened, range(7), keep=True) == expected[:7]
    assert await ssts.blocks(opened, range(7), keep=False) == expected[:7]
    assert len(levels.store.reads) == 2


async def test_requests_in_flight_keep_to_the_budget() -> None:
    """Concurrent reads keep within the budget of bytes in flight, except one large one alone."""
    levels = Levels()
    value = b"v" * 300_000
    points = [Entry(b"%03d" % key, key + 1, Kind.PUT, value) for key in range(20)]
    info = levels.add(1, points, block_bytes=1)
    ssts = levels.open(read_in_flight_bytes=1 * MIB, block_cache_bytes=0)
    opened = await ssts.metadata(info)
    levels.gate.close()
    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(ssts.block(opened, number))
        await quiesce()
        assert levels.gate.waiting == 3
        assert ssts.counters.in_flight_bytes <= 1 * MIB
        levels.gate.open()
    counters = ssts.counters
    assert (counters.in_flight_bytes, counters.in_flight_waits) == (0, 17)
    assert 900_000 < counters.in_flight_bytes_peak <= 1 * MIB
    assert len(await ssts.blocks(opened, range(20), keep=False)) == 20
    assert ssts.counters.in_flight_bytes_peak > 1 * MIB


async def test_a_cut_or_swapped_object_is_found() -> None:
    """An object that is shorter, or that is another SST of this database, is refused."""
    levels = Levels()
    one = levels.add(1, POINTS[:50], block_bytes=100)
    other = levels.add(2, POINTS[50:], block_bytes=100)
    opened = await levels.open().metadata(one)
    for data in (levels.data(level_name(other.id)), levels.data(level_name(one.id))[200:], b""):
        levels.overwrite(level_name(one.id), data)
        with pytest.raises(CorruptObject, match=level_name(one.id)):
            await levels.open().metadata(one)
        with pytest.raises(CorruptObject, match=level_name(one.id)):
            await levels.open().blocks(opened, range(1, len(opened.index)), keep=True)
