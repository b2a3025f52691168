"""What jobs over a range of keys leave."""

from __future__ import annotations

import pytest

from shalekv.core.compaction.jobs import WalJob
from shalekv.core.compaction.reserving import reservations
from shalekv.core.compaction.shape import LAST_LEVEL
from shalekv.core.key_range import KeyRange
from shalekv.core.tree import L0, Tree
from shalekv.engine.compaction.range_run import plan_range
from shalekv.engine.compaction.wal_tail import merge_tail
from shalekv.errors import (
    InvalidRequest,
    PartFailed,
    Superseded,
)
from tests.kit.engine.compaction import (
    STORE_NOW_MS,
    Trial,
    delete,
    delete_range,
    merge_job,
    put,
    small_settings,
)
from tests.kit.engine.naive_merge import NaiveTree, answers
from tests.unit.engine.compaction.range_ground import filled, ranged, request
from tests.unit.engine.compaction.test_merge_model import KEYS, check


async def test_all_ends_in_the_last_level() -> None:
    """One run, without tombstones, older versions, or what has expired; and no lease is left."""
    trial = await filled()
    before = await trial.stored.refresh()
    report = await ranged(trial)
    manifest = await trial.stored.refresh()
    await check(trial)
    naive = await NaiveTree.read(trial.store, manifest)
    assert {info.level for info in manifest.leveled_ssts} == {LAST_LEVEL}
    kept = naive.entries()
    now_ms = manifest.logical_time_ms
    found = answers(trial.compacted(manifest), KEYS, now_ms)
    assert sorted(entry.key for entry in kept) == sorted(k for k, v in found.items() if v)
    assert report.is_done
    assert report.parts > 1
    assert report.output_rows == len(kept)
    assert report.input_rows == sum(info.entry_count for info in before.leveled_ssts)
    assert report.dropped_rows == report.input_rows - len(kept)
    assert report.dropped_tombstones > 0
    assert report.output_tombstones == 0
    assert (report.input_ssts, report.manifest_id) == (
        len(before.leveled_ssts),
        before.manifest_id + 2,
    )
    assert (report.epoch, report.seq) == (1, before.last_compacted_seq)
    assert not reservations(manifest, 0)
    assert manifest.leases == before.leases
    # Whoever has the old manifest reads what it read before.
    assert (await NaiveTree.read(trial.store, before)).answers(KEYS, now_ms) == found


async def test_a_dry_run_touches_nothing() -> None:
    """The plan says what the job then does, and neither manifest nor objects change."""
    trial = await filled()
    await trial.write([put(b"later")])
    before, objects = await trial.stored.refresh(), await trial.levels()
    plan = await plan_range(trial.cas, request(trial))
    assert await trial.stored.refresh() == before
    assert await trial.levels() == objects
    assert (plan.is_dry_run, plan.is_done, plan.wal_objects) == (True, False, 1)
    report = await ranged(trial)
    assert (report.inputs, report.parts) == (plan.inputs, plan.parts)
    assert "would be merged" in str(plan)
    assert "1 WAL objects" in str(report)


async def test_other_keys_stay_as_they_are() -> None:
    """SSTs beyond the range, and beyond what hangs together with it, are the same objects."""
    trial = await Trial.begun(small_settings(sst_bytes=60))
    for value in (b"old", b"new"):
        await trial.write([put(key, value * 5) for key in KEYS[1:-2]])
        slot = len(trial.written) - 1
        await trial.run(WalJob(range(slot, slot + 1), ""))
        tree = Tree.of(await trial.stored.refresh())
        job = merge_job(tree, L0, 3 if value == b"old" else 2, len(tree.l0))
        assert job is not None
        await trial.run(job)
    before = {info.id for info in (await trial.stored.refresh()).leveled_ssts}
    report = await ranged(trial, KeyRange(b"k04", b"k06"))
    after = (await trial.stored.refresh()).leveled_ssts
    await check(trial)
    replaced = [info for info in after if info.id not in before]
    assert 0 < report.input_ssts < len(before) / 2
    assert all(info.first_key >= b"k02" and info.last_key <= b"k08" for info in replaced)


async def test_what_is_merged_is_left_alone() -> None:
    """A second job finds nothing to drop, unless it is told to write all again."""
    trial = await filled()
    await ranged(trial)
    before = await trial.stored.refresh()
    again = await ranged(trial)
    assert not again.is_done
    assert "nothing to do" in str(again)
    assert (await trial.stored.refresh()).leveled_ssts == before.leveled_ssts
    assert (await ranged(trial, forced=True)).is_done
    await check(trial)


@pytest.mark.parametrize(("later_ms", "is_kept"), [(2_004, True), (2_005, False)])
async def test_expired_values_are_kept_for_a_while(later_ms: int, *, is_kept: bool) -> None:
    """For `expired_kept_s` after their moment they stay, by logical time."""
    trial = await Trial.begun(small_settings(sst_bytes=10_000, expired_kept_s=2))
    await trial.write([put(b"a", b"v", STORE_NOW_MS + 5)])
    await trial.write([put(b"b")], time_ms=later_ms)
    await trial.run(WalJob(range(2), ""))
    await ranged(trial)
    naive = await NaiveTree.read(trial.store, await trial.stored.refresh())
    assert [entry.key for entry in naive.entries()] == ([b"a", b"b"] if is_kept else [b"b"])


@pytest.mark.parametrize("is_ranged", [True, False])
async def test_the_empty_key_alone_has_an_end(*, is_ranged: bool) -> None:
    """An SST with that key alone would seem to have no upper bound, and overlap its neighbours."""
    trial = await Trial.begun(small_settings(sst_bytes=60))
    await trial.write([put(b""), *(put(key, b"v" * 30) for key in KEYS if key)])
    await trial.run(WalJob(range(1), ""))
    job = merge_job(Tree.of(await trial.stored.refresh()), L0, LAST_LEVEL, 99)
    assert job is not None
    await trial.run(job)
    bound = min(info.last_key for info in (await trial.stored.refresh()).leveled_ssts)
    await trial.write([delete(key) for key in KEYS if b"" < key <= bound])
    await trial.run(WalJob(range(1, 2), ""))
    if is_ranged:
        assert (await ranged(trial, KeyRange(b"", bound))).is_done
    else:
        job = merge_job(Tree.of(await trial.stored.refresh()), L0, LAST_LEVEL, 1)
        assert job is not None
        await trial.run(job)
    await check(trial)


async def test_a_range_without_keys_is_refused() -> None:
    """Before anything is done."""
    trial = await filled(slots=1)
    with pytest.raises(InvalidRequest, match="no key is from"):
        await ranged(trial, KeyRange(b"b", b"a"))


async def test_an_empty_database_has_nothing_to_merge() -> None:
    """Nor has one whose data are in the WAL alone, of which the report tells."""
    trial = await Trial.begun()
    assert not (await ranged(trial)).is_done
    await trial.write([put(b"a")])
    report = await ranged(trial)
    assert (report.is_done, report.wal_objects) == (False, 1)


async def test_a_part_that_fails_publishes_nothing() -> None:
    """The lease is given up, and the levels are as they were."""
    trial = await filled()

    async def fail() -> None:
        raise PartFailed("a process is gone")

    before = await trial.stored.refresh()
    with pytest.raises(PartFailed):
        await ranged(trial, meanwhile=fail)
    after = await trial.stored.refresh()
    assert (after.leveled_ssts, after.leases) == (before.leveled_ssts, before.leases)


async def test_the_tail_is_merged_by_whoever_becomes_the_compactor() -> None:
    """All of the WAL is in the levels, no lease is left, and the older compactor ends."""
    trial = await filled()
    before = await trial.stored.refresh()
    for slot in range(3):
        await trial.write(
            [put(b"k%02d" % slot, b"tail"), delete(b"k07")], [delete_range(b"k1", b"")]
        )
    assert await merge_tail(trial.cas, trial.settings, holder="test") == 3
    after = await trial.stored.refresh()
    assert after.first_uncompacted_wal_id == len(trial.written)
    assert (after.compactor_epoch, after.leases) == (2, before.leases)
    await check(trial)
    await trial.write([put(b"k01")])
    with pytest.raises(Superseded):
        await trial.run(WalJob(range(11, 12), ""))
