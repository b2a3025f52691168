"""Jobs over a range of keys beside compactors: who yields, and what is published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.compaction.jobs import MergeJob
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
from shalekv.engine.compaction.range_run import EVERYTHING, run_range
from shalekv.errors import (
    LeaseLost,
    ManifestConflict,
)
from tests.kit.engine.compaction import (
    Trial,
    merge_job,
    random_entry,
    small_settings,
)
from tests.unit.engine.compaction.range_ground import Parts, filled, ranged, request
from tests.unit.engine.compaction.test_merge_model import DEEPEST, KEYS, check, picked


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
