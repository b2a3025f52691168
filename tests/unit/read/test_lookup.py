"""Lookups find the newest version with as few block reads as filters allow: counted, not timed."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shalekv.errors import BadChecksum, StoreUnavailable
from shalekv.format.names import level_name
from shalekv.format.records import record_key
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.manifest import SYSTEM_LEVEL, Version
from shalekv.read.lookup import find, find_many, find_record, may_hold, may_hold_record
from shalekv.read.source import level_sources
from shalekv.read.sst_reader import LevelSsts
from shalekv.telemetry.activity import CURRENT, CallActivity
from tests.kit.engine.levels import Levels, add_run, range_tombstone

KEYS = 5_000
CACHE_BYTES = 38_000
FILTER_BITS = 16.0  # lets 1 absent key in 800 through, so that 5 filters let 1 in 160


def key_of(number: int) -> bytes:
    return b"key%08d" % (number * 2)


def absent(number: int) -> bytes:
    return b"key%08d" % (number * 2 + 1)


@pytest.fixture(scope="module")
def large() -> Levels:
    """Return three L0 SSTs over two levels: each key is in one of them, and each has a filter."""
    random = Random(5)
    parts: list[list[Entry]] = [[] for _ in range(5)]
    for number in range(KEYS):
        of_number = random.choices(range(5), [1, 1, 1, 10, 87])[0]
        entry = Entry(key_of(number), 100 - of_number, Kind.PUT, random.randbytes(150))
        parts[of_number].append(entry)
    levels = Levels()
    for part in parts[:3]:
        levels.add(0, part, block_bytes=1024, filter_bits=FILTER_BITS)
    for level, part in ((1, parts[3]), (2, parts[4])):
        cuts = [part[at].key for at in range(len(part) // 3, len(part), len(part) // 3)]
        add_run(levels, level, part, cuts=cuts, block_bytes=1024, filter_bits=FILTER_BITS)
    data_bytes = sum(info.filter_offset for info in levels.infos)
    assert data_bytes > 20 * CACHE_BYTES
    return levels


def opened(levels: Levels) -> tuple[LevelSsts, Version]:
    """Return a reader with a block cache of under a twentieth of the levels, and their version."""
    return levels.open(block_cache_bytes=CACHE_BYTES), levels.version()


def assert_one_block_per_hit(ssts: LevelSsts, hits: int) -> None:
    """At most one data block was fetched for each hit, apart from false positives."""
    counters = ssts.counters
    assert counters.blocks_fetched <= hits + counters.filter_false_positives
    assert counters.filter_false_positives < hits / 100


async def test_a_hit_fetches_one_block(large: Levels) -> None:
    """A hit in a database 20 times the cache fetches at most 1 data block, and nothing else."""
    ssts, version = opened(large)
    await ssts.open_many(large.infos)
    metadata_requests = ssts.counters.metadata_requests
    assert metadata_requests == len(large.infos)
    hits = 1_000
    for number in Random(1).choices(range(KEYS), k=hits):
        found = await find(ssts, version, key_of(number))
        assert found is not None
        assert found.key == key_of(number)
    assert_one_block_per_hit(ssts, hits)
    assert ssts.counters.block_requests == ssts.counters.blocks_fetched
    assert ssts.counters.metadata_requests == metadata_requests
    assert ssts.counters.block_held_bytes <= CACHE_BYTES


async def test_a_miss_fetches_next_to_nothing(large: Levels) -> None:
    """100 misses in a database 20 times the cache fetch fewer than 1 data block."""
    ssts, version = opened(large)
    misses = 3_000
    for number in Random(2).sample(range(KEYS - 1), misses):
        assert await find(ssts, version, absent(number)) is None
    counters = ssts.counters
    assert counters.blocks_fetched < misses / 100
    assert counters.blocks_fetched <= counters.filter_false_positives
    assert counters.filter_positives == counters.filter_false_positives
    requested = counters.filter_negatives + counters.filter_positives
    assert 4.9 * misses < requested <= 5 * misses
    fresh, _ = opened(large)
    assert await find_many(fresh, version, [absent(number) for number in range(misses)]) == {}
    assert fresh.counters.blocks_fetched <= fresh.counters.filter_false_positives < misses / 50


async def test_many_at_once_read_each_block_once(large: Levels) -> None:
    """A lookup of thousands of keys fetches each data block once, neighbours together."""
    ssts, version = opened(large)
    numbers = Random(4).sample(range(KEYS), 1_000)
    large.store.requests.clear()
    found = await find_many(ssts, version, [key_of(number) for number in numbers])
    assert {*found} == {key_of(number) for number in numbers}
    assert set(large.block_reads().values()) == {1}
    counters = ssts.counters
    assert counters.blocks_fetched == large.block_reads().total()
    assert counters.block_requests < counters.blocks_fetched / 2
    assert_one_block_per_hit(ssts, len(numbers))


async def test_a_cold_lookup_opens_all_it_needs_at_once(large: Levels) -> None:
    """The metadata that a lookup misses is fetched in parallel."""
    ssts, version = opened(large)
    large.gate.close()
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(find(ssts, version, absent(KEYS // 2)))
        for _ in range(30):
            await asyncio.sleep(0)
        assert large.gate.waiting == 5
        large.gate.open()
    assert call.result() is None


async def test_range_tombstone_answers_without_reading_blocks() -> None:
    """Keys that a range tombstone hides are not read; a put of the same commit is newer."""
    levels = Levels()
    levels.add(2, [Entry(key, 1, Kind.PUT) for key in (b"a", b"b", b"h")])
    put = Entry(b"d", 5, Kind.PUT)
    levels.add(0, [put], [range_tombstone(b"b", b"f", 5), range_tombstone(b"h", b"", 6)])
    ssts, version = levels.open(), levels.version()
    await ssts.open_many(levels.infos)
    assert await find(ssts, version, b"b") is None
    assert await find_many(ssts, version, [b"b", b"h"]) == {}
    assert not may_hold(ssts, version, b"b")
    assert ssts.counters.blocks_fetched == 0
    assert await find(ssts, version, b"d") == put
    assert await find_many(ssts, version, [b"d"]) == {b"d": put}


async def test_a_lookup_stops_where_it_finds() -> None:
    """A key found in a newer source is not searched in older ones, which are not even opened."""
    levels = Levels()
    levels.add(2, [Entry(b"a", 1, Kind.PUT), Entry(b"k", 1, Kind.PUT)])
    newest = levels.add(0, [Entry(b"k", 2, Kind.TOMBSTONE)])
    ssts, version = levels.open(), levels.version()
    await ssts.metadata(newest)
    assert await find(ssts, version, b"k") == Entry(b"k", 2, Kind.TOMBSTONE)
    assert {name for name, _, _ in levels.store.reads} == {level_name(newest.id)}


@pytest.mark.parametrize("filter_bits", [None, 10.0])
async def test_records_of_the_system(filter_bits: float | None) -> None:
    """The newest record is found, by filter if there is one; records and keys are separate."""
    levels = Levels()
    keys = [record_key(b"%03d" % number) for number in range(200)]
    for at, seq in ((0, 1), (50, 2), (100, 3)):
        records = [Entry(key, seq, Kind.PUT, b"record", 99) for key in keys[at : at + 100]]
        levels.add(SYSTEM_LEVEL, records=records, block_bytes=100, filter_bits=filter_bits)
    ssts, version = levels.open(block_cache_bytes=0), levels.version()
    for number, key in enumerate(keys):
        found = await find_record(ssts, version, key)
        assert found == Entry(key, min(number // 50 + 1, 3), Kind.PUT, b"record", 99)
        assert may_hold_record(ssts, version, key)
        assert await find(ssts, version, key) is None
    fetched = ssts.counters.blocks_fetched
    assert fetched <= len(keys) + ssts.counters.filter_false_positives or filter_bits is None
    assert await find_record(ssts, version, record_key(b"absent")) is None
    denied = [may_hold_record(ssts, version, record_key(b"absent %d" % at)) for at in range(500)]
    assert denied.count(False) > 450 or filter_bits is None
    assert await find_record(ssts, Levels().version(), keys[0]) is None


async def test_the_error_of_one_of_many_reads_is_the_error() -> None:
    """A damaged block or a failing store raises the same error as for a single key."""
    levels = Levels()
    entries = [Entry(b"%03d" % key, 1, Kind.PUT, b"v" * 50) for key in range(100)]
    info = levels.add(1, entries, block_bytes=1)
    ssts, version = levels.open(), levels.version()
    await ssts.open_many(levels.infos)
    requested = [entry.key for entry in entries[::2]]
    levels.store.fail("get_range")
    with pytest.raises(StoreUnavailable):
        await find_many(ssts, version, requested)
    assert len(await find_many(ssts, version, requested)) == len(requested)
    handle = levels.sst(level_name(info.id)).index[50]
    data = bytearray(levels.data(level_name(info.id)))
    data[handle.offset + 20] ^= 4
    levels.overwrite(level_name(info.id), bytes(data))
    fresh = levels.open()
    with pytest.raises(BadChecksum) as raised:
        await find_many(fresh, version, requested)
    assert (raised.value.name, raised.value.offset) == (level_name(info.id), handle.offset)
    assert fresh.counters.in_flight_bytes == 0


async def test_a_call_records_what_its_reads_have_searched(large: Levels) -> None:
    """SSTs that were searched, and blocks at hand or fetched, are recorded for the call alone."""
    deep = 30
    ssts, version = opened(large)
    one, again, many, scanned = (CallActivity(0) for _ in range(4))
    key = key_of(deep)
    CURRENT.set(one)
    found = await find(ssts, version, key)
    assert found is not None
    assert found.seq == 96  # in the last level
    CURRENT.set(again)
    assert await find(ssts, version, key) is not None
    assert again.ssts_searched == one.ssts_searched > 1
    assert (one.blocks_cached, one.blocks_fetched) == (0, 1)
    assert (again.blocks_cached, again.blocks_fetched) == (1, 0)
    assert [request.operation for request in again.requests] == []
    # All the metadata, and the block.
    assert len(one.requests) == len([*version.sources_of(key)]) + 1
    CURRENT.set(many)
    keys = [key_of(number) for number in range(deep, 500)]
    assert len(await find_many(ssts, version, keys)) == len(keys)
    assert many.ssts_searched <= len(large.infos)
    assert many.blocks_cached > 0
    assert many.blocks_fetched > 10
    CURRENT.set(scanned)
    sources = level_sources(ssts, version, KeyRange(key_of(deep), key_of(100)), reverse=False)
    for source in sources:
        await source.next()
    assert scanned.ssts_searched == len(sources) > 1
    assert scanned.blocks_cached + scanned.blocks_fetched >= len(sources)
