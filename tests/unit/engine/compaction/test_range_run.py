"""Jobs over a range of keys: what they leave, and what happens beside a compactor."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.compaction.jobs import MergeJob, WalJob
from shalekv.core.compaction.policy import LeveledPolicy
from shalekv.core.compaction.range_job import RangeResult
from shalekv.core.compaction.reserving import is_range_published, reservations
from shalekv.core.compaction.shape import LAST_LEVEL
from shalekv.core.compaction.standing_back import new_runs
from shalekv.core.compaction.state import CompactionState
from shalekv.core.key_range import KeyRange
from shalekv.core.lease import without_lease
from shalekv.core.manifest import Manifest
from shalekv.core.tree import L0, Tree
from shalekv.engine.compaction.backlog import list_backlog
from shalekv.engine.compaction.part import Part, PartResult
from shalekv.engine.compaction.parts import OwnProcessParts
from shalekv.engine.compaction.range_parts import PartLimits
from shalekv.engine.compaction.range_report import CompactionReport
from shalekv.engine.compaction.range_run import EVERYTHING, RangeRequest, plan_range, run_range
from shalekv.engine.compaction.wal_tail import merge_tail
from shalekv.errors import (
    InvalidRequest,
    LeaseLost,
    ManifestConflict,
    PartFailed,
    Superseded,
)
from shalekv.settings import CompactSettings
from tests.unit.engine.compaction.naive import NaiveTree, answers
from tests.unit.engine.compaction.test_merge_model import DEEPEST, KEYS, check, picked
from tests.unit.engine.compaction.trial import (
    STORE_NOW_MS,
    Trial,
    delete,
    delete_range,
    merge_job,
    put,
    random_entry,
    small_settings,
)

Meanwhile = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Nothing happens meanwhile."""


class Parts(OwnProcessParts):
    """Runs parts that have travelled, while a test lets something else happen."""

    is_parallel = True

    def __init__(self, trial: Trial, meanwhile: Meanwhile = nothing) -> None:
        super().__init__(trial.cas)
        self._meanwhile = meanwhile
        self.parts: Sequence[Part] = ()

    async def run(
        self, parts: Sequence[Part], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """Their results, when the other thing has happened as well."""
        self.parts = parts
        travelled: Sequence[Part] = pickle.loads(pickle.dumps(parts))  # noqa: S301 - our own
        results = await super().run(travelled, is_lifted)
        await self._meanwhile()
        return results


def request(trial: Trial, keys: KeyRange = EVERYTHING, *, forced: bool = False) -> RangeRequest:
    """A job over these keys, in several parts."""
    limits = PartLimits(
        part_bytes=600,
        memory_bytes=trial.settings.compactor.subcompaction_memory_bytes,
        parallel_count=2,
        levels=trial.settings.levels,
    )
    return RangeRequest(
        limits=limits, keys=keys, compactor=trial.settings.compactor, is_forced=forced
    )


async def ranged(
    trial: Trial,
    keys: KeyRange = EVERYTHING,
    *,
    meanwhile: Meanwhile = nothing,
    forced: bool = False,
) -> CompactionReport:
    """Run such a job."""
    return await run_range(trial.cas, request(trial, keys, forced=forced), Parts(trial, meanwhile))


async def filled(seed: int = 1, slots: int = 8, limits: CompactSettings | None = None) -> Trial:
    """A database with changes in L0 and in two levels below."""
    trial, random = await Trial.begun(limits, seed), Random(seed)
    for slot in range(slots):
        entries = {e.key: e for e in (random_entry(random, KEYS, STORE_NOW_MS) for _ in range(12))}
        await trial.write([*entries.values()], time_ms=5)
        await trial.run(WalJob(range(slot, slot + 1), ""))
        if slot in {2, 5}:
            tree = Tree.of(await trial.stored.refresh())
            job = merge_job(tree, L0, DEEPEST if slot == 2 else DEEPEST - 1, len(tree.l0))
            assert job is not None
            await trial.run(job)
    return trial


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


async def test_there_is_one_job_at_a_time() -> None:
    """A second one is refused before it begins, until the first ends or its lease does."""
    trial = await filled()

    async def second() -> None:
        with pytest.raises(ManifestConflict, match="merges the levels already"):
            await ranged(trial)

    await ranged(trial, meanwhile=second)
    await check(trial)


async def test_without_its_lease_nothing_is_published() -> None:
    """What the lease protected may be deleted by now (F3)."""
    trial = await filled()

    async def collect() -> None:
        (lease,) = reservations(trial.stored.current, 0) or reservations(
            await trial.stored.refresh(), 0
        )
        await trial.stored.edit(lambda m: without_lease(m, lease.id), lambda _: True)

    before = await trial.stored.refresh()
    with pytest.raises(LeaseLost):
        await ranged(trial, meanwhile=collect)
    assert (await trial.stored.refresh()).leveled_ssts == before.leveled_ssts


async def test_an_input_that_vanished_ends_the_job() -> None:
    """Whoever has merged it: nothing is published, and what was written is garbage."""
    trial = await filled()

    async def rogue() -> None:
        manifest = await trial.stored.refresh()
        tree = Tree.of(manifest)
        job = merge_job(tree, L0, DEEPEST - 1, len(tree.l0))
        assert job is not None
        await trial.run(job)  # picked in spite of the reservation

    with pytest.raises(ManifestConflict, match="Nothing was published"):
        await ranged(trial, meanwhile=rogue)
    manifest = await trial.stored.refresh()
    await check(trial)
    assert not reservations(manifest, 0)
    assert LAST_LEVEL not in {info.level for info in manifest.leveled_ssts}
    listed = {info.id.hex() for info in manifest.leveled_ssts}
    assert any(name[7:-4].replace("-", "") not in listed for name in await trial.levels())


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


async def test_a_merge_that_began_before_gives_way() -> None:
    """A compactor's job is not published over a reservation that it did not know, and then not
    over the result; and none of it is an illegal state.
    """
    trial = await filled()
    picked_for = await trial.stored.refresh()
    tree = Tree.of(picked_for)
    job = merge_job(tree, L0, DEEPEST - 1, len(tree.l0))
    assert job is not None

    async def late() -> None:
        with pytest.raises(ManifestConflict, match="has reserved an input meanwhile"):
            await trial.compactions.run(job, picked_for, tree, lambda: False)

    assert (await ranged(trial, meanwhile=late)).is_done
    with pytest.raises(ManifestConflict, match="has merged an input meanwhile"):
        await trial.compactions.run(job, picked_for, tree, lambda: False)
    await check(trial)


async def test_writes_and_compactions_go_on_above() -> None:
    """While the job runs, the compactor merges what comes, and L0 does not fill up."""
    limits = small_settings(l0_trigger_count=2, wal_trigger_bytes=1, base_level_bytes=2_000)
    trial, random = await filled(limits=limits), Random(5)
    policy = LeveledPolicy(limits.compactor, limits.levels)
    reserved = 0
    before = {info.level for info in (await trial.stored.refresh()).leveled_ssts}
    levels: set[int] = set()
    merges = 0

    async def go_on() -> None:
        nonlocal reserved, merges
        for _ in range(12):
            entries = {e.key: e for e in (random_entry(random, KEYS, 0) for _ in range(12))}
            await trial.write([*entries.values()], time_ms=5)
            while True:
                manifest = await trial.stored.refresh()
                (lease,) = reservations(manifest, 0)
                reserved = lease.reserved_seq or 0
                wal = await list_backlog(trial.cas, manifest.first_uncompacted_wal_id, 0)
                state = CompactionState(
                    Tree.of(manifest), wal, is_hurried=False, reserved_seq=reserved
                )
                job = policy.pick(state)
                if job is None:
                    break
                await trial.compactions.run(job, manifest, state.tree, lambda: False)
                merges += isinstance(job, MergeJob)
                await check(trial)
                levels.update(info.level for info in (await trial.stored.refresh()).leveled_ssts)
            assert len(new_runs(state.tree, reserved)) <= 5

    assert (await ranged(trial, meanwhile=go_on)).is_done
    await check(trial)
    assert levels == before
    assert merges > 2
    manifest = await trial.stored.refresh()
    assert {i.level for i in manifest.leveled_ssts if i.max_seq <= reserved} == {LAST_LEVEL}


async def test_its_own_edit_is_known_again() -> None:
    """Also when what it wrote was merged before the edit could be looked for (F2)."""
    trial = await filled()
    seen: list[Manifest] = []

    class Spying(Parts):
        async def run(
            self, parts: Sequence[Part], is_lifted: Callable[[], bool]
        ) -> Sequence[PartResult]:
            results = await super().run(parts, is_lifted)
            self.results = results
            return results

    parts = Spying(trial)
    before = await trial.stored.refresh()
    edit = type(trial.stored)._create_next  # noqa: SLF001 - what each edit makes

    async def create(stored: object, current: Manifest, edited: Manifest) -> Manifest | None:
        seen.append(edited)
        return await edit(stored, current, edited)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trial.stored), "_create_next", create)
        await run_range(trial.cas, request(trial), parts)
    reserved, published, ended = seen
    outputs = [info for part in parts.results for info in part.outputs]
    from shalekv.core.compaction.range_job import pick_range  # noqa: PLC0415

    job = pick_range(Tree.of(before), EVERYTHING, reserved_seq=before.last_compacted_seq)
    assert job is not None
    (lease,) = reservations(reserved, 0)
    for result in (RangeResult(job, outputs), RangeResult(job, [])):
        assert not is_range_published(before, result, lease.id)
        assert not is_range_published(reserved, result, lease.id)
        assert is_range_published(published, result, lease.id)
    assert is_range_published(ended, RangeResult(job, outputs), lease.id)


async def history(seed: int) -> None:
    """Jobs over ranges, while a compactor that stands back, or does not, does anything."""
    random = Random(seed)
    limits = small_settings(sst_bytes=random.choice((60, 250, 4_000)), subcompactions=2)
    trial = await Trial.begun(limits, seed)

    async def write() -> None:
        for _ in range(random.randrange(4)):
            entries = (
                random_entry(random, KEYS, trial.logical_time_ms)
                for _ in range(random.randrange(9))
            )
            commit = [*{entry.key: entry for entry in entries}.values()]
            await trial.write(*([commit] if commit else []), time_ms=random.choice((0, 5, 900)))

    async def compact() -> None:
        manifest = await trial.stored.refresh()
        tree = Tree.of(manifest)
        left = len(trial.written) - manifest.first_uncompacted_wal_id
        job = picked(random, tree, left)
        # Below the last level of these tests nothing is merged but by the job over a range.
        if isinstance(job, MergeJob) and job.source_level >= DEEPEST:
            return
        if job is not None:
            await trial.run(job)

    async def meanwhile() -> None:
        for _ in range(random.randrange(5)):
            await write()
            await compact()
            await check(trial)

    for _ in range(random.randint(2, 6)):
        await meanwhile()
        start, end = sorted((random.choice(KEYS), random.choice(KEYS)))
        keys = KeyRange(start, end if start < end and random.random() < 0.8 else b"")
        before = await trial.stored.refresh()
        try:
            await ranged(trial, keys, meanwhile=meanwhile, forced=random.random() < 0.3)
        except ManifestConflict:
            assert (await trial.stored.refresh()).manifest_id > before.manifest_id + 1
        await check(trial)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_no_job_changes_an_answer(seed: int) -> None:
    """Whatever else is merged meanwhile, in whatever order, every key holds what was written last:
    what a compactor should not have done makes the job end in vain, at worst (I2, I9).
    """
    asyncio.run(history(seed))


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
