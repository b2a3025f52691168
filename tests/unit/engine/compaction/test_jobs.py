"""What single jobs leave, to the entry."""

from __future__ import annotations

import pytest

from shalekv.core.compaction.jobs import MergeJob, MergeResult, WalResult
from shalekv.core.entry import Entry, Kind
from shalekv.core.tree import L0, SYSTEM_LEVEL, Tree
from shalekv.errors import BadChecksum, IllegalState
from shalekv.format.names import level_name
from shalekv.format.system_key import record_key
from tests.kit.engine.compaction import (
    STORE_NOW_MS,
    CompactedDatabase,
    delete,
    delete_range,
    merge_job,
    put,
    record,
    small_settings,
)
from tests.kit.engine.naive_merge import NaiveTree
from tests.unit.engine.compaction.range_jobs import ranged

OVER_MS = STORE_NOW_MS + 5


async def compacted(database: CompactedDatabase, *, target: int = 3) -> NaiveTree:
    while (await database.stored.refresh()).first_uncompacted_wal_id < len(database.written):
        await database.compact_wal()
    await database.merge(L0, target)
    return await database.read()


async def test_at_the_bottom_nothing_is_remembered_of_what_is_gone() -> None:
    """Tombstones, range tombstones and what has expired leave nothing where nothing is below."""
    database = await CompactedDatabase.begun()
    await database.write([put(b"a")], [put(b"b")], [put(b"c", b"v", STORE_NOW_MS + 5)], [put(b"d")])
    await database.write([delete(b"a")], [delete_range(b"b", b"c")], time_ms=10)
    naive = await compacted(database)
    assert [(entry.key, entry.seq) for entry in naive.entries()] == [(b"d", 4)]


async def test_above_the_bottom_they_stay() -> None:
    """Where an older version may be below, tombstones stay, and what has expired becomes one."""
    database = await CompactedDatabase.begun(small_settings(sst_bytes=10_000))
    await database.write([put(b"a"), put(b"b"), put(b"c"), put(b"e")])
    await compacted(database)
    await database.write([delete(b"a")], [put(b"b", b"new", STORE_NOW_MS + 5)])
    await database.write([delete_range(b"c", b"d")], [delete(b"x")], time_ms=10)
    await database.compact_wal()
    await database.merge(L0, 1)
    naive = await database.read()
    upper = [entry for entry in naive.entries() if entry.seq > 1]
    assert sorted((entry.key, entry.kind, entry.value) for entry in upper) == [
        (b"a", Kind.TOMBSTONE, b""),
        (b"b", Kind.TOMBSTONE, b""),
        (b"c", Kind.RANGE_TOMBSTONE, b"d"),
    ]


async def test_tombstone_of_a_sweep_keeps_its_expiry() -> None:
    """Above the bottom it stays as it is; at the bottom it goes."""
    database = await CompactedDatabase.begun(small_settings(sst_bytes=10_000))
    await database.write([put(b"a", b"older"), put(b"b")])
    await compacted(database, target=9)
    await database.write([Entry(b"a", 0, Kind.TOMBSTONE, b"", OVER_MS)], time_ms=10)
    naive = await compacted(database, target=1)
    upper = [entry for entry in naive.entries() if entry.seq > 1]
    assert [each[2:] for each in upper] == [(Kind.TOMBSTONE, b"", OVER_MS)]
    await database.merge(1, 9)
    assert [entry.key for entry in (await database.read()).entries()] == [b"b"]


@pytest.mark.parametrize("is_ranged", [True, False])
@pytest.mark.parametrize(("later_ms", "is_kept"), [(2_004, True), (2_005, False)])
async def test_expired_values_are_kept_for_a_while(
    later_ms: int, *, is_kept: bool, is_ranged: bool
) -> None:
    """For `expired_kept_s` after their moment they stay as they are, by logical time."""
    limits = small_settings(sst_bytes=10_000, expired_kept_s=2)
    database = await CompactedDatabase.begun(limits)
    await database.write([put(b"a", b"v", OVER_MS)])
    await database.write([put(b"b")], time_ms=later_ms)
    await database.compact_wal()
    await (ranged(database) if is_ranged else database.merge(L0, 9))
    kept = [entry.key for entry in (await database.read()).entries()]
    assert kept == ([b"a", b"b"] if is_kept else [b"b"])


async def test_records_are_kept_until_nobody_may_ask() -> None:
    """A record is found in its window, and told to have expired for as long again; then it goes."""
    for age_ms, is_there in ((0, True), (1_000, True), (1_999, True), (2_000, False)):
        database = await CompactedDatabase.begun(small_settings(record_kept_s=1))
        await database.write([put(b"a")], records=[record(b"r", STORE_NOW_MS + 1_000)])
        await database.write([put(b"b")], time_ms=age_ms)
        await database.compact_wal()
        await database.merge(SYSTEM_LEVEL, SYSTEM_LEVEL, 1)
        naive = await database.read()
        assert (naive.record(record_key(b"r")) is not None) == is_there


@pytest.mark.parametrize("first", [0, 1])
async def test_slots_out_of_order_are_refused(first: int) -> None:
    """A slot whose numbers are not above what is compacted or read before it ends the job (I4)."""
    database = await CompactedDatabase.begun()
    await database.write([put(b"a")], [put(b"b")])
    database.last_seq = 1
    await database.write([put(b"c")])
    if first:
        await database.compact_wal(range(1))
    with pytest.raises(IllegalState, match="slot order must be sequence order"):
        await database.compact_wal()
    assert (await database.stored.refresh()).first_uncompacted_wal_id == first


async def test_a_damaged_input_is_not_merged() -> None:
    """A flipped bit in a block of an input ends the merge, and nothing is published."""
    database = await CompactedDatabase.begun()
    await database.write([put(b"a", b"v" * 99)])
    await database.compact_wal()
    before = await database.stored.refresh()
    tree = Tree.of(before)
    name = level_name(tree.l0[0].id)
    data = bytearray((await database.store.get(name)).data)
    data[20] ^= 1
    await database.store.delete([name])
    await database.store.create(name, bytes(data))
    job = merge_job(tree, L0, 1, 1)
    assert job is not None
    with pytest.raises(BadChecksum):
        await database.run(job)
    assert (await database.stored.refresh()).leveled_ssts == before.leveled_ssts


async def test_a_job_takes_as_many_slots_as_memory_has_room_for() -> None:
    """The first slots of a job are compacted, and the rest is left for the next."""
    database = await CompactedDatabase.begun(small_settings(sst_bytes=2_000))
    for _ in range(5):
        await database.write([put(b"a", b"v" * 1_500)])
    result = await database.compact_wal()
    assert isinstance(result, WalResult)
    assert result.job.slots == range(3)
    assert (await database.stored.refresh()).wal_id_last_compacted == 2


async def test_a_large_merge_is_divided_and_each_part_reads_its_share() -> None:
    """Parts have no key in common, their outputs are one run, and no block is read in vain."""
    database = await CompactedDatabase.begun(
        small_settings(sst_bytes=4_000, block_bytes=200, subcompactions=3)
    )
    keys = [b"%04d" % n for n in range(600)]
    for _ in range(2):
        await database.write([put(key, b"v" * 20) for key in keys])
        await database.compact_wal()
    tree = Tree.of(await database.stored.refresh())
    job = merge_job(tree, L0, 1, 99)
    assert isinstance(job, MergeJob)
    before = database.compactions.counters.read_bytes
    result = await database.run(job)
    assert database.parts.counts == [3]
    assert isinstance(result, MergeResult)
    assert sum(info.entry_count for info in result.outputs) == len(keys)
    # Each part reads the block at its border, and the metadata of what it has a share of, too.
    assert database.compactions.counters.read_bytes - before < 1.5 * job.input_bytes
