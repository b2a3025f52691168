"""The outputs of range jobs, and random jobs over all states of a key."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.errors import InvalidRequest, ManifestConflict, PartFailed, Superseded
from shalekv.jobs.compact.range_job import plan_range
from shalekv.jobs.compact.run import compact_wal
from shalekv.protocol.compaction.jobs import WalJob
from shalekv.protocol.compaction.policy import LAST_LEVEL
from shalekv.protocol.compaction.publish import reservations
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.manifest import L0
from tests.kit.engine.compaction import (
    CompactedDatabase,
    delete,
    delete_range,
    put,
    record,
    small_settings,
)
from tests.kit.engine.naive_merge import NaiveLevels, answers
from tests.unit.jobs.compact.range_jobs import (
    KEYS,
    check,
    filled,
    picked,
    random_commit,
    ranged,
    request,
)


async def test_all_ends_in_the_last_level() -> None:
    """A range job leaves one sorted run without tombstones, older versions or expired values, and
    no lease.
    """
    database = await filled()
    before = await database.stored.refresh()
    report = await ranged(database)
    manifest = await database.stored.refresh()
    await check(database)
    assert {info.level for info in manifest.leveled_ssts} == {LAST_LEVEL}
    kept = (await database.read()).entries()
    now_ms = manifest.logical_time_ms
    found = answers(database.compacted(manifest), KEYS, now_ms)
    assert sorted(entry.key for entry in kept) == sorted(k for k, v in found.items() if v)
    assert report.is_done
    assert report.parts > 1
    assert report.output_rows == len(kept)
    assert report.input_rows == sum(info.entry_count for info in before.leveled_ssts)
    assert report.dropped_rows == report.input_rows - len(kept)
    assert report.dropped_tombstones > report.output_tombstones == 0
    assert report.input_ssts == len(before.leveled_ssts)
    assert report.manifest_id == before.manifest_id + 2
    assert (report.epoch, report.seq) == (1, before.last_compacted_seq)
    assert not reservations(manifest, 0)
    assert manifest.leases == before.leases
    # A reader of the old manifest reads what it read before.
    assert (await NaiveLevels.read(database.store, before)).answers(KEYS, now_ms) == found
    # A second job finds nothing to drop, unless it is forced to write all again.
    again = await ranged(database)
    assert not again.is_done
    assert "nothing to do" in str(again)
    assert (await database.stored.refresh()).leveled_ssts == manifest.leveled_ssts
    assert (await ranged(database, forced=True)).is_done
    await check(database)


async def test_dry_run_changes_nothing() -> None:
    """The plan says what the job then does, and neither manifest nor objects change."""
    database = await filled()
    await database.write([put(b"later")])
    before, objects = await database.stored.refresh(), await database.levels()
    plan = await plan_range(database.cas, request(database))
    assert await database.stored.refresh() == before
    assert await database.levels() == objects
    assert (plan.is_dry_run, plan.is_done, plan.wal_objects) == (True, False, 1)
    report = await ranged(database)
    assert (report.inputs, report.parts) == (plan.inputs, plan.parts)
    assert "would be merged" in str(plan)
    assert "1 WAL objects" in str(report)


async def test_other_keys_stay_as_they_are() -> None:
    """SSTs outside of the range, and not connected to it by overlaps, stay the same objects."""
    database = await CompactedDatabase.begun(small_settings(sst_bytes=60))
    for value, level in ((b"old", 3), (b"new", 2)):
        await database.write([put(key, value * 5) for key in KEYS[1:-2]])
        await database.compact_wal()
        await database.merge(L0, level)
    before = {info.id for info in (await database.stored.refresh()).leveled_ssts}
    report = await ranged(database, KeyRange(b"k04", b"k06"))
    after = (await database.stored.refresh()).leveled_ssts
    await check(database)
    replaced = [info for info in after if info.id not in before]
    assert 0 < report.input_ssts < len(before) / 2
    assert all(info.first_key >= b"k02" and info.last_key <= b"k08" for info in replaced)


@pytest.mark.parametrize("is_ranged", [True, False])
async def test_the_empty_key_alone_has_an_end(*, is_ranged: bool) -> None:
    """An SST with only the empty key has an upper bound, so that it does not overlap its
    neighbours.
    """
    database = await CompactedDatabase.begun(small_settings(sst_bytes=60))
    await database.write([put(b""), *(put(key, b"v" * 30) for key in KEYS if key)])
    await database.compact_wal()
    await database.merge(L0, LAST_LEVEL)
    bound = min(info.last_key for info in (await database.stored.refresh()).leveled_ssts)
    await database.write([delete(key) for key in KEYS if b"" < key <= bound])
    await database.compact_wal()
    if is_ranged:
        assert (await ranged(database, KeyRange(b"", bound))).is_done
    else:
        await database.merge(L0, LAST_LEVEL, 1)
    await check(database)


async def test_nothing_to_merge() -> None:
    """A range without keys is refused; without SSTs nothing is done."""
    database = await CompactedDatabase.begun()
    with pytest.raises(InvalidRequest, match="no key is from"):
        await ranged(database, KeyRange(b"b", b"a"))
    assert not (await ranged(database)).is_done
    await database.write([put(b"a")])
    report = await ranged(database)
    assert (report.is_done, report.wal_objects) == (False, 1)


async def test_a_part_that_fails_publishes_nothing() -> None:
    """After a failed part, the lease is given up, and the levels are as before."""
    database = await filled()

    async def fail() -> None:
        raise PartFailed("a process is gone")

    before = await database.stored.refresh()
    with pytest.raises(PartFailed):
        await ranged(database, meanwhile=fail)
    after = await database.stored.refresh()
    assert (after.leveled_ssts, after.leases) == (before.leveled_ssts, before.leases)


async def test_the_tail_is_merged_by_a_new_compactor() -> None:
    """The whole WAL is in the levels, no lease is left, and the older compactor ends."""
    database = await filled()
    before = await database.stored.refresh()
    for slot in range(3):
        await database.write(
            [put(b"k%02d" % slot, b"tail"), delete(b"k07")], [delete_range(b"k1", b"")]
        )
    assert await compact_wal(database.cas, database.settings, holder="test") == 3
    after = await database.stored.refresh()
    assert after.first_uncompacted_wal_id == len(database.written)
    assert (after.compactor_epoch, after.leases) == (2, before.leases)
    await check(database)
    await database.write([put(b"k01")])
    with pytest.raises(Superseded):
        await database.run(WalJob(range(11, 12), ""))


async def history(seed: int) -> None:
    """Write and merge at random; check the database after every job."""
    random = Random(seed)
    limits = small_settings(
        sst_bytes=random.choice((60, 250, 4_000)), subcompactions=random.choice((1, 3))
    )
    database = await CompactedDatabase.begun(limits, seed)

    async def write_and_compact() -> None:
        for _ in range(random.randrange(5)):
            for _ in range(random.randrange(4)):
                now_ms = database.logical_time_ms
                counts = [random.randrange(9) for _ in range(random.randrange(4))]
                commits = [c for n in counts for c in random_commit(random, n, now_ms)]
                expiry_ms = now_ms + random.randrange(3_000)
                records = [record(b"r%d" % random.randrange(4), expiry_ms)]
                kept = records if commits and random.random() < 0.4 else []
                await database.write(*commits, records=kept, time_ms=random.choice((0, 5, 900)))
            manifest = await database.stored.refresh()
            left = len(database.written) - manifest.first_uncompacted_wal_id
            job = picked(random, await database.version(), left)
            if job is not None:
                await database.run(job)
                await check(database)

    for _ in range(random.randint(2, 5)):
        await write_and_compact()
        start, end = sorted((random.choice(KEYS), random.choice(KEYS)))
        keys = KeyRange(start, end if start < end and random.random() < 0.8 else b"")
        before = await database.stored.refresh()
        try:
            forced = random.random() < 0.3
            await ranged(database, keys, meanwhile=write_and_compact, forced=forced)
        except ManifestConflict:
            assert (await database.stored.refresh()).manifest_id > before.manifest_id + 1
        await check(database)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_no_compaction_changes_an_answer(seed: int) -> None:
    """Whatever is merged in whatever order, also beside a range job, every key has the value last
    written; at worst, the range job fails (I2, I9).
    """
    asyncio.run(history(seed))
