"""The outputs of single jobs, entry by entry, and the bound of their rate."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from shalekv.errors import BadChecksum, IllegalState
from shalekv.format.columns import Columns, Section
from shalekv.format.footer import SstProperties
from shalekv.format.names import MANIFEST_FOLDER, level_name, wal_name
from shalekv.format.records import load_entry, record_key
from shalekv.format.sst import open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.jobs.compact.claim import CompactorLeases
from shalekv.jobs.compact.outputs import LevelWriter
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import OwnProcessParts, run_part
from shalekv.jobs.compact.run import Compactions
from shalekv.protocol.compaction.jobs import MergeJob, MergeResult, WalJob, WalResult
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.lease import RANDOM_BYTES, leased_sst_id, new_lease_id
from shalekv.protocol.loads import is_pending, register_load
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, PendingLoad, Version
from shalekv.protocol.sst_table import SstTable
from shalekv.settings import KIB, MIB, LevelCodec, LevelSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.local import LocalStore
from shalekv.store.manifests import CompactorManifest, StoredManifest
from tests.kit.engine.compaction import (
    NONCE,
    OWNER,
    STORE_NOW_MS,
    CompactedDatabase,
    delete,
    delete_range,
    merge_job,
    put,
    record,
    small_settings,
    whole_part,
)
from tests.kit.engine.hand_clock import HandClock
from tests.kit.engine.naive_merge import NaiveLevels
from tests.kit.inline_runtime import inline_runtime
from tests.kit.store import FaultyStore, Request, nothing
from tests.unit.jobs.compact.range_jobs import ranged

OVER_MS = STORE_NOW_MS + 5


async def compacted(database: CompactedDatabase, *, target: int = 3) -> NaiveLevels:
    while (await database.stored.refresh()).first_uncompacted_wal_id < len(database.written):
        await database.compact_wal()
    await database.merge(L0, target)
    return await database.read()


async def test_at_the_bottom_nothing_is_remembered_of_what_is_gone() -> None:
    """At the bottom, tombstones, range tombstones and expired values are dropped."""
    database = await CompactedDatabase.begun()
    await database.write([put(b"a")], [put(b"b")], [put(b"c", b"v", STORE_NOW_MS + 5)], [put(b"d")])
    await database.write([delete(b"a")], [delete_range(b"b", b"c")], time_ms=10)
    naive = await compacted(database)
    assert [(entry.key, entry.seq) for entry in naive.entries()] == [(b"d", 4)]


async def test_above_the_bottom_they_stay() -> None:
    """Where an older version may be below, tombstones stay, and expired values become some."""
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


async def test_a_result_that_counts_is_published_once() -> None:
    """A result stays published once if another edit follows before its compactor has looked."""
    database = await CompactedDatabase.begun()
    await database.write([put(b"a")])
    passed_by: list[str] = []

    async def edit_once_published(request: Request) -> None:
        if request.operation == "create" and request.name.startswith(MANIFEST_FOLDER):
            if not (await database.stored.refresh()).leveled_ssts:
                return  # the edit that takes the lease of the job
            store.after = nothing
            passed_by.append(request.name)
            await database.stored.edit(
                lambda current: replace(current, gc_cutoff_ms=current.gc_cutoff_ms + 1),
                lambda _: True,
            )

    store = FaultyStore(database.store, after=edit_once_published)
    cas = CasStore(store, database.cas.runtime, database.settings.store)
    manifest = CompactorManifest(StoredManifest(cas), CompactorId(1, NONCE))
    leases = CompactorLeases(cas, ttl_s=600, holder="test")
    compactions = Compactions(cas, manifest, leases, database.settings, OwnProcessParts(cas))
    current, job = await manifest.refresh(), WalJob(range(1), "by hand")
    running = asyncio.create_task(compactions.run(job, current, Version.of(current), lambda: True))
    while not running.done():
        database.clock.advance(1_000)  # a second edit would wait for its turn
        await asyncio.sleep(0)
    await running
    assert passed_by
    assert len((await database.stored.refresh()).leveled_ssts) == 1


async def test_tombstone_of_a_sweep_keeps_its_expiry() -> None:
    """The tombstone of a sweep stays unchanged above the bottom, and is dropped at the bottom."""
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
    """For `expired_value_kept_s` of logical time after their expiry, values stay unchanged."""
    limits = small_settings(sst_bytes=10_000, expired_value_kept_s=2)
    database = await CompactedDatabase.begun(limits)
    await database.write([put(b"a", b"v", OVER_MS)])
    await database.write([put(b"b")], time_ms=later_ms)
    await database.compact_wal()
    await (ranged(database) if is_ranged else database.merge(L0, 9))
    kept = [entry.key for entry in (await database.read()).entries()]
    assert kept == ([b"a", b"b"] if is_kept else [b"b"])


async def test_records_are_kept_until_they_may_be_forgotten() -> None:
    """A record is found in its window, and as expired for as long again; then it is dropped."""
    for age_ms, is_there in ((0, True), (1_000, True), (1_999, True), (2_000, False)):
        database = await CompactedDatabase.begun(small_settings(idempotency_record_kept_s=1))
        await database.write([put(b"a")], records=[record(b"r", STORE_NOW_MS + 1_000)])
        await database.write([put(b"b")], time_ms=age_ms)
        await database.compact_wal()
        await database.merge(SYSTEM_LEVEL, SYSTEM_LEVEL, 1)
        naive = await database.read()
        assert (naive.record(record_key(b"r")) is not None) == is_there


@pytest.mark.parametrize("first", [0, 1])
async def test_slots_out_of_order_are_refused(first: int) -> None:
    """A slot whose numbers are not above those compacted or read before ends the job (I4)."""
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
    version = Version.of(before)
    name = level_name(version.l0[0].id)
    data = bytearray((await database.store.get(name)).data)
    data[20] ^= 1
    await database.store.delete([name])
    await database.store.create(name, bytes(data))
    job = merge_job(version, L0, 1, 1)
    assert job is not None
    with pytest.raises(BadChecksum):
        await database.run(job)
    assert (await database.stored.refresh()).leveled_ssts == before.leveled_ssts


async def test_a_job_takes_as_many_slots_as_fit_into_memory() -> None:
    """The first slots of a job are compacted, and the rest is left for the next job."""
    database = await CompactedDatabase.begun(small_settings(sst_bytes=2_000))
    for _ in range(5):
        await database.write([put(b"a", b"v" * 1_500)])
    result = await database.compact_wal()
    assert isinstance(result, WalResult)
    assert result.job.slots == range(3)
    assert (await database.stored.refresh()).wal_id_last_compacted == 2


async def test_a_large_merge_is_divided_and_each_part_reads_its_share() -> None:
    """Parts have no key in common, their outputs are one sorted run, and blocks are read once."""
    database = await CompactedDatabase.begun(
        small_settings(sst_bytes=4_000, block_bytes=200, subcompactions=3)
    )
    keys = [b"%04d" % n for n in range(600)]
    for _ in range(2):
        await database.write([put(key, b"v" * 20) for key in keys])
        await database.compact_wal()
    version = Version.of(await database.stored.refresh())
    job = merge_job(version, L0, 1, 99)
    assert isinstance(job, MergeJob)
    before = database.compactions.counters.read_bytes
    result = await database.run(job)
    assert database.parts.counts == [3]
    assert isinstance(result, MergeResult)
    assert sum(info.entry_count for info in result.outputs) == len(keys)
    # Each part reads the block at its border, and the metadata of what it has a share of, too.
    assert database.compactions.counters.read_bytes - before < 1.5 * job.input_bytes


async def test_a_merge_stays_within_its_memory(tmp_path: Path) -> None:
    """Inputs three times as large as the memory are merged within it, filters included."""
    runtime = inline_runtime()
    store = CasStore(LocalStore(tmp_path, runtime), runtime, StoreSettings())
    pace, random = TokenBucket(runtime.clock, 0), Random(1)
    settings = LevelSettings(codec=LevelCodec.NONE, block_bytes=4 * KIB)
    memory_bytes, runs, rows, step = 4 * MIB, 4, 10_500, 500
    sources = []
    for run in range(runs):
        writer = LevelWriter(store, OWNER, settings, pace)
        sst = writer.begin()
        for first in range(0, rows, step):
            keys = [b"%08d" % (runs * n + run) for n in range(first, first + step)]
            values = [random.randbytes(300) for _ in keys]
            put_kinds = bytes([Kind.PUT]) * step
            sst.add(
                Section.POINTS, Columns(keys, [runs - run] * step, put_kinds, values, [0] * step)
            )
        sources.append([await writer.create(sst, L0)])
    assert sum(info.size_bytes for run in sources for info in run) > 3 * memory_bytes
    part = whole_part(sources, levels=settings, memory_bytes=memory_bytes)
    tracemalloc.start()
    try:
        result = await run_part(store, part, pace)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(info.entry_count for info in result.outputs) == runs * rows
    assert peak_bytes < memory_bytes, f"{peak_bytes:,} bytes"


def properties(database: CompactedDatabase, name: str) -> SstProperties:
    return SstProperties(
        name=name,
        database_id=database.stored.current.database_id,
        writer_epoch=1,
        writer_nonce=bytes(16),
        write_id=bytes(16),
        logical_time_ms=STORE_NOW_MS,
    )


async def loaded(database: CompactedDatabase, load_id: str, *keys: bytes) -> None:
    """Load a file with these keys, whose record fills the next slot."""
    lease_id = new_lease_id(1, bytes(RANDOM_BYTES))
    sst_id = leased_sst_id(lease_id, len(database.written).to_bytes(8, "big"))
    name = level_name(sst_id)
    data = encode_sst(
        properties(database, name), [put(key, b"load") for key in keys], block_bytes=99
    )
    await database.store.create(name, data)
    info = open_sst(name, data, database_id=None).footer.info(0)
    unnumbered = replace(info, min_seq=0, max_seq=0)
    load = PendingLoad(load_id, SstTable.from_infos([unnumbered]))
    await database.stored.edit(
        lambda current: register_load(current, load, oldest_ms=STORE_NOW_MS),
        lambda current: is_pending(current, load_id),
    )
    database.last_seq += 1
    slot = wal_name(len(database.written))
    control = [load_entry(load, database.last_seq)]
    await database.store.create(
        slot, encode_sst(properties(database, slot), (), (), (), control, block_bytes=99)
    )
    database.written.append([put(key, b"load")._replace(seq=database.last_seq) for key in keys])


async def test_a_slot_with_a_load_is_merged_alone() -> None:
    """No SST of L0 holds both older and newer entries than a load, which becomes an SST itself."""
    database = await CompactedDatabase.begun(small_settings(sst_bytes=10_000))
    await database.write([put(b"a", b"before"), put(b"b", b"before")])
    await loaded(database, "load", b"a", b"c")
    await database.write([put(b"c", b"after")])
    for slots in (range(1), range(1, 2), range(2, 3)):
        result = await database.compact_wal()
        assert isinstance(result, WalResult)
        assert result.job.slots == slots
    manifest = await database.stored.refresh()
    assert manifest.pending_loads == ()
    assert [load.load_id for load in manifest.recent_loads] == ["load"]
    version = Version.of(manifest)
    assert [(info.min_seq, info.max_seq) for info in version.l0] == [(3, 3), (2, 2), (1, 1)]
    expected = {b"a": (2, b"load"), b"b": (1, b"before"), b"c": (3, b"after")}
    naive = await database.read()
    assert naive.answers(expected, STORE_NOW_MS) == expected
    await database.merge(L0, 1)
    naive = await database.read()
    assert naive.answers(expected, STORE_NOW_MS) == expected


async def taken(
    clock: HandClock, pace: TokenBucket, *, sizes: int, step_ms: float, steps: int
) -> int:
    """Return how many pieces of `sizes` bytes are taken in `steps` steps of the clock."""
    count = 0

    async def take() -> None:
        nonlocal count
        while True:
            await pace.take(sizes)
            count += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(take())
        for _ in range(steps):
            for _ in range(20):
                await asyncio.sleep(0)
            clock.advance(step_ms)
        task.cancel()
    return count


async def test_bytes_in_a_second_are_bounded() -> None:
    """Over ten seconds, at most the bytes of the rate and one more piece are taken."""
    clock = HandClock()
    pace = TokenBucket(clock, 1_000)
    count = await taken(clock, pace, sizes=500, step_ms=10, steps=1_000)
    assert 20 <= count <= 21


async def test_what_holds_writes_back_is_not_bounded() -> None:
    """Once the bound is lifted nothing waits any more; without a rate nothing ever waits."""
    clock, lifted = HandClock(), False
    pace = TokenBucket(clock, 1, lambda: lifted)
    assert await taken(clock, pace, sizes=1_000, step_ms=1, steps=50) <= 2
    lifted = True
    assert await taken(clock, pace, sizes=1_000, step_ms=100, steps=5) > 10
    assert await taken(clock, TokenBucket(clock, 0), sizes=1_000, step_ms=0, steps=5) > 10
