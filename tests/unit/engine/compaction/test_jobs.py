"""What single jobs leave, to the entry."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from random import Random, SystemRandom

import pytest

from shalekv.clock import LoopClock
from shalekv.core.compaction.jobs import MergeJob, MergeResult, WalJob, WalResult
from shalekv.core.compaction.publish import CompactorId
from shalekv.core.compaction.remains import OlderKeys
from shalekv.core.entry import Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.lease import RANDOM_BYTES, new_lease_id
from shalekv.core.tree import L0, SYSTEM_LEVEL, Tree
from shalekv.engine.compaction.outputs import Authorship, LevelWriter
from shalekv.engine.compaction.pace import Pace
from shalekv.engine.compaction.part import Part, run_part
from shalekv.errors import BadChecksum, IllegalState, WrongObject
from shalekv.format.columns import Columns
from shalekv.format.names import level_name, wal_name
from shalekv.format.section import Section
from shalekv.format.sst_metadata import metadata_range, read_metadata
from shalekv.format.system_key import record_key
from shalekv.runtime import Runtime
from shalekv.settings import KIB, MIB, LevelCodec, LevelSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.local import LocalStore
from tests.kit.engine.compaction import (
    STORE_NOW_MS,
    Trial,
    delete,
    delete_range,
    merge_job,
    put,
    record,
    small_settings,
)
from tests.kit.engine.naive_merge import NaiveTree
from tests.kit.inline_runtime import InlineWorkers


async def compacted(trial: Trial, *, target: int = 3) -> NaiveTree:
    """All slots in one level."""
    count = len(trial.written)
    while (first := (await trial.stored.refresh()).first_uncompacted_wal_id) < count:
        await trial.run(WalJob(range(first, count), "all"))
    tree = Tree.of(await trial.stored.refresh())
    job = merge_job(tree, L0, target, len(tree.l0))
    assert job is not None
    await trial.run(job)
    return await NaiveTree.read(trial.store, await trial.stored.refresh())


async def test_at_the_bottom_nothing_is_remembered_of_what_is_gone() -> None:
    """Tombstones, range tombstones and what has expired leave nothing where nothing is below."""
    trial = await Trial.begun()
    await trial.write([put(b"a")], [put(b"b")], [put(b"c", b"v", STORE_NOW_MS + 5)], [put(b"d")])
    await trial.write([delete(b"a")], [delete_range(b"b", b"c")], time_ms=10)
    naive = await compacted(trial)
    assert [(entry.key, entry.seq) for entry in naive.entries()] == [(b"d", 4)]


async def test_above_the_bottom_they_stay() -> None:
    """Where an older version may be below, tombstones stay, and what has expired becomes one."""
    trial = await Trial.begun(small_settings(sst_bytes=10_000))
    await trial.write([put(b"a"), put(b"b"), put(b"c"), put(b"e")])
    await compacted(trial)
    await trial.write([delete(b"a")], [put(b"b", b"new", STORE_NOW_MS + 5)])
    await trial.write([delete_range(b"c", b"d")], [delete(b"x")], time_ms=10)
    await trial.run(WalJob(range(1, 3), "rest"))
    tree = Tree.of(await trial.stored.refresh())
    job = merge_job(tree, L0, 1, 9)
    assert job is not None
    await trial.run(job)
    naive = await NaiveTree.read(trial.store, await trial.stored.refresh())
    upper = [entry for entry in naive.entries() if entry.seq > 1]
    assert sorted((entry.key, entry.kind, entry.value) for entry in upper) == [
        (b"a", Kind.TOMBSTONE, b""),
        (b"b", Kind.TOMBSTONE, b""),
        (b"c", Kind.RANGE_TOMBSTONE, b"d"),
    ]


async def test_what_the_same_slots_delete_is_not_written() -> None:
    """Points that a range tombstone of the same job hides do not reach L0; those after it do."""
    trial = await Trial.begun(small_settings(sst_bytes=10_000))
    await trial.write([put(b"a"), put(b"b")])
    await trial.write([delete_range(b"a", b"c")], [put(b"b", b"new")])
    await trial.run(WalJob(range(2), ""))
    naive = await NaiveTree.read(trial.store, await trial.stored.refresh())
    found = [(entry.key, entry.seq, entry.kind) for entry in naive.entries()]
    assert found == [(b"b", 3, Kind.PUT), (b"a", 2, Kind.RANGE_TOMBSTONE)]


async def test_the_empty_key_alone_does_not_reach_over_its_neighbours() -> None:
    """An SST of the empty key, whose bounds would be none, gets an upper bound."""
    trial = await Trial.begun(small_settings(sst_bytes=10))
    await trial.write([put(b"", b"v" * 30), put(b"\x00", b"v" * 30), put(b"b", b"v" * 30)])
    naive = await compacted(trial)
    (run,) = naive.tree.runs
    assert [info.last_key for info in run.ssts] == [b"\x00", b"\x00", b"b"]
    found = naive.answers([b"", b"\x00", b"b"], STORE_NOW_MS)
    assert all(found.values())


async def test_records_are_kept_until_nobody_may_ask() -> None:
    """A record is found in its window, and told to have expired for as long again; then it goes."""
    for age_ms, is_there in ((0, True), (1_000, True), (1_999, True), (2_000, False)):
        trial = await Trial.begun(small_settings(record_kept_s=1))
        await trial.write([put(b"a")], records=[record(b"r", STORE_NOW_MS + 1_000)])
        await trial.write([put(b"b")], time_ms=age_ms)
        await trial.run(WalJob(range(2), ""))
        job = merge_job(Tree.of(await trial.stored.refresh()), SYSTEM_LEVEL, SYSTEM_LEVEL, 1)
        assert job is not None
        await trial.run(job)
        naive = await NaiveTree.read(trial.store, await trial.stored.refresh())
        assert (naive.record(record_key(b"r")) is not None) == is_there


async def test_records_have_a_filter() -> None:
    """Each SST of records says of most keys that it has no record of them."""
    trial = await Trial.begun(small_settings(sst_bytes=10_000))
    await trial.write([put(b"a")], records=[record(b"r%d" % n, STORE_NOW_MS) for n in range(9)])
    await trial.run(WalJob(range(1), ""))
    manifest = await trial.stored.refresh()
    (info,) = Tree.of(manifest).system
    data = await trial.store.get_range(level_name(info.id), *metadata_range(info))
    found = read_metadata(info, data, database_id=manifest.database_id).filter
    assert found is not None
    assert found.keys == 9
    assert found.may_contain(record_key(b"r1"))


@pytest.mark.parametrize("first", [0, 1])
async def test_slots_out_of_order_are_refused(first: int) -> None:
    """A slot whose numbers are not above what is compacted or read before it ends the job (I4)."""
    trial = await Trial.begun()
    await trial.write([put(b"a")], [put(b"b")])
    trial.last_seq = 1
    await trial.write([put(b"c")])
    if first:
        await trial.run(WalJob(range(1), ""))
    with pytest.raises(IllegalState, match="slot order must be sequence order"):
        await trial.run(WalJob(range(first, 2), ""))
    assert (await trial.stored.refresh()).first_uncompacted_wal_id == first


async def test_slots_of_another_database_are_refused() -> None:
    """A WAL object that does not belong here ends the job."""
    trial, other = await Trial.begun(seed=1), await Trial.begun(seed=2)
    for each in (trial, other):
        await each.write([put(b"a")])
    await trial.store.delete([wal_name(0)])
    await trial.store.create(wal_name(0), (await other.store.get(wal_name(0))).data)
    with pytest.raises(WrongObject):
        await trial.run(WalJob(range(1), ""))


async def test_a_damaged_input_is_not_merged() -> None:
    """A flipped bit in a block of an input ends the merge, and nothing is published."""
    trial = await Trial.begun()
    await trial.write([put(b"a", b"v" * 99)])
    await trial.run(WalJob(range(1), ""))
    before = await trial.stored.refresh()
    tree = Tree.of(before)
    name = level_name(tree.l0[0].id)
    data = bytearray((await trial.store.get(name)).data)
    data[20] ^= 1
    await trial.store.delete([name])
    await trial.store.create(name, bytes(data))
    job = merge_job(tree, L0, 1, 1)
    assert job is not None
    with pytest.raises(BadChecksum):
        await trial.run(job)
    assert (await trial.stored.refresh()).leveled_ssts == before.leveled_ssts


async def test_a_job_takes_as_many_slots_as_memory_has_room_for() -> None:
    """The first slots of a job are compacted, and the rest is left for the next."""
    trial = await Trial.begun(small_settings(sst_bytes=2_000))
    for _ in range(5):
        await trial.write([put(b"a", b"v" * 1_500)])
    result = await trial.run(WalJob(range(5), ""))
    assert isinstance(result, WalResult)
    assert result.job.slots == range(3)
    assert (await trial.stored.refresh()).wal_id_last_compacted == 2


async def test_a_large_merge_is_divided_and_each_part_reads_its_share() -> None:
    """Parts have no key in common, their outputs are one run, and no block is read in vain."""
    trial = await Trial.begun(small_settings(sst_bytes=4_000, block_bytes=200, subcompactions=3))
    keys = [b"%04d" % n for n in range(600)]
    for _ in range(2):
        await trial.write([put(key, b"v" * 20) for key in keys])
        await trial.run(WalJob(range(len(trial.written) - 1, len(trial.written)), ""))
    tree = Tree.of(await trial.stored.refresh())
    job = merge_job(tree, L0, 1, 99)
    assert isinstance(job, MergeJob)
    before = trial.compactions.counters.read_bytes
    result = await trial.run(job)
    assert trial.parts.counts == [3]
    assert isinstance(result, MergeResult)
    assert sum(info.entry_count for info in result.outputs) == len(keys)
    # Each part reads the block at its border, and the metadata of what it has a share of, too.
    assert trial.compactions.counters.read_bytes - before < 1.5 * job.input_bytes


async def test_a_merge_stays_within_its_memory(tmp_path: Path) -> None:
    """Inputs several times as large as the memory are merged within it, filters included."""
    runtime = Runtime(LoopClock(), SystemRandom(), InlineWorkers())
    store = CasStore(LocalStore(tmp_path, runtime), runtime, StoreSettings())
    pace, random = Pace(runtime.clock, 0), Random(1)
    author = Authorship(
        bytes(16), CompactorId(1, bytes(16)), new_lease_id(1, bytes(RANDOM_BYTES)), 1
    )
    settings = LevelSettings(codec=LevelCodec.NONE, block_bytes=4 * KIB)
    memory_bytes, runs, rows = 8 * MIB, 4, 20_000
    sources = []
    for run in range(runs):
        writer = LevelWriter(store, author, settings, pace)
        sst = writer.begin()
        for start in range(0, rows, 500):
            keys = [b"%08d" % (runs * n + run) for n in range(start, start + 500)]
            values = [random.randbytes(300) for _ in keys]
            sst.add(
                Section.POINTS, Columns(keys, [runs - run] * 500, b"\1" * 500, values, [0] * 500)
            )
        sources.append([await writer.create(sst, L0)])
    size_bytes = sum(info.size_bytes for run in sources for info in run)
    assert size_bytes > 3 * memory_bytes
    part = Part(
        author=author,
        target_level=1,
        sources=sources,
        keys=KeyRange(b"", b""),
        older=OlderKeys(),
        expiry_horizon_ms=0,
        cuts=(),
        levels=settings,
        memory_bytes=memory_bytes,
        bytes_per_s=0,
    )
    tracemalloc.start()
    try:
        result = await run_part(store, part, pace)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(info.entry_count for info in result.outputs) == runs * rows
    assert peak_bytes < memory_bytes, f"{peak_bytes:,} bytes"
