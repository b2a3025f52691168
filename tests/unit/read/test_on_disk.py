"""With a disk cache, a new process reads without the store, and nothing damaged is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from shalekv.errors import CorruptObject
from shalekv.format.names import level_name
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.read.lookup import find, find_many
from shalekv.read.source import KEPT_BLOCKS_MAX, level_sources
from shalekv.read.sst_reader import LevelSsts
from shalekv.store.disk_cache import DiskCache
from shalekv.store.disk_cache_folder import CachedPart
from tests.kit.disks.cache_folders import open_cache
from tests.kit.engine.levels import Levels, range_tombstone
from tests.kit.samples import DATABASE_ID

POINTS = [Entry(b"%03d" % key, key + 1, Kind.PUT, b"v" * 30) for key in range(100)]
RANGES = [range_tombstone(b"%03d" % key, b"%03d" % (key + 3), 500) for key in range(0, 90, 10)]
KEYS = [b"%03d" % key for key in range(100)]
ALL = KeyRange(b"", b"")


def levels_of_two() -> Levels:
    levels = Levels()
    levels.add(2, POINTS, block_bytes=200)
    levels.add(1, POINTS[::7], RANGES, block_bytes=100)
    return levels


async def read_all(levels: Levels, ssts: LevelSsts) -> list[Entry | None]:
    version = levels.version()
    return [await find(ssts, version, key) for key in KEYS]


async def cached(levels: Levels, path: Path) -> list[Entry | None]:
    """Read everything once, so that it is on the disk."""
    disk = open_cache(path)
    found = await read_all(levels, levels.open(disk))
    await disk.flush()
    levels.store.requests.clear()
    return found


async def test_a_new_process_asks_the_store_for_nothing(tmp_path: Path) -> None:
    """Pieces that another process has read come from the disk: metadata, ranges and blocks."""
    levels = levels_of_two()
    expected = await cached(levels, tmp_path)
    assert expected == await read_all(levels, levels.open())
    levels.store.requests.clear()
    ssts = levels.open(open_cache(tmp_path))
    assert await read_all(levels, ssts) == expected
    assert await find_many(levels.open(open_cache(tmp_path)), levels.version(), KEYS) == {
        entry.key: entry for entry in expected if entry is not None
    }
    assert levels.store.reads == []
    counters = ssts.counters
    assert (counters.block_requests, counters.metadata_requests, counters.blocks_fetched) == (
        0,
    ) * 3
    assert counters.disk is not None
    assert (counters.disk.misses, counters.disk.errors) == (0, 0)
    assert counters.disk.hits > 20


async def test_long_scans_pass_the_disk_by(tmp_path: Path) -> None:
    """A scan caches its first blocks on the disk; blocks that it reads ahead bypass the cache."""
    levels = Levels()
    levels.add(1, POINTS, block_bytes=50)
    disk = open_cache(tmp_path)
    ssts = levels.open(disk)

    async def scan() -> int:
        rows = 0
        for source in level_sources(ssts, levels.version(), ALL, reverse=False):
            while (window := await source.next()) is not None:
                rows += len(window.run.keys)
        return rows

    assert await scan() == 100
    await disk.flush()
    blocks = 1 + 2 + KEPT_BLOCKS_MAX
    assert disk.counters.written == blocks + 1  # its index
    searched = disk.counters.hits + disk.counters.misses
    assert searched == blocks + 1
    ssts = levels.open(disk)
    assert await scan() == 100
    assert disk.counters.hits == blocks + 1
    assert disk.counters.misses == searched


async def test_sound_files_with_wrong_contents_are_fetched_again(tmp_path: Path) -> None:
    """Pieces that the SST's checksums refuse are not served, even if the file's checksum holds."""
    levels = levels_of_two()
    expected = await cached(levels, tmp_path)
    disk = open_cache(tmp_path)
    for part in await parts_of(levels, disk):
        disk.keep(part, bytes(part.length))
    await disk.flush()
    assert await read_all(levels, levels.open(disk)) == expected
    assert disk.counters.damaged > 20
    await disk.flush()
    levels.store.requests.clear()
    assert await read_all(levels, levels.open(open_cache(tmp_path))) == expected
    assert levels.store.reads == []


async def parts_of(levels: Levels, disk: DiskCache) -> list[CachedPart]:
    """Return all parts of these levels that are on the disk."""
    parts = []
    for info in levels.infos:
        opened = await levels.open().metadata(info)
        ranges = [(handle.offset, handle.length) for handle in opened.index]
        ranges.append((info.filter_offset, info.filter_len))
        ranges.append((info.block_meta_offset, info.size_bytes - info.block_meta_offset))
        parts += [CachedPart(DATABASE_ID, info.id, *at) for at in ranges]
    found = await disk.find(parts)
    return [part for part, data in zip(parts, found, strict=True) if data is not None]


async def test_damage_on_the_way_from_the_store_is_not_kept(tmp_path: Path) -> None:
    """Pieces that a checksum of the SST refuses are not written to the disk, to stay there."""
    levels = Levels()
    info = levels.add(1, POINTS, block_bytes=200)
    name = level_name(info.id)
    sound = levels.data(name)
    for at in range(0, len(sound), len(sound) // 6):
        levels.overwrite(name, sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        disk = open_cache(tmp_path / str(at))
        with pytest.raises(CorruptObject):
            await read_all(levels, levels.open(disk))
        await disk.flush()
        levels.overwrite(name, sound)
        assert await read_all(levels, levels.open(disk)) == POINTS
        assert disk.counters.damaged == 0
