"""Range jobs beside compactors: which one yields, and what is published."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.errors import LeaseLost, ManifestConflict
from shalekv.jobs.compact.range_job import EVERYTHING, run_range
from shalekv.jobs.compact.run import list_backlog
from shalekv.protocol.compaction.jobs import CompactionState, MergeJob
from shalekv.protocol.compaction.policy import LAST_LEVEL, LeveledPolicy, new_runs
from shalekv.protocol.compaction.publish import is_range_published, reservations
from shalekv.protocol.compaction.range_job import RangeResult, pick_range
from shalekv.protocol.lease import without_lease
from shalekv.protocol.manifest import L0, Manifest, Version
from tests.kit.engine.compaction import merge_job, small_settings
from tests.unit.jobs.compact.range_jobs import (
    DEEPEST,
    Parts,
    check,
    filled,
    random_commit,
    ranged,
    request,
)


async def test_there_is_one_job_at_a_time() -> None:
    """A second range job is refused before it begins, until the first ends or its lease expires."""
    database = await filled()

    async def second() -> None:
        with pytest.raises(ManifestConflict, match="merges the levels already"):
            await ranged(database)

    await ranged(database, meanwhile=second)
    await check(database)


async def test_without_its_lease_nothing_is_published() -> None:
    """A job without its lease publishes nothing, since its outputs may be deleted by then (F3)."""
    database = await filled()

    async def collect() -> None:
        (lease,) = reservations(database.stored.current, 0) or reservations(
            await database.stored.refresh(), 0
        )
        await database.stored.edit(lambda m: without_lease(m, lease.id), lambda _: True)

    before = await database.stored.refresh()
    with pytest.raises(LeaseLost):
        await ranged(database, meanwhile=collect)
    assert (await database.stored.refresh()).leveled_ssts == before.leveled_ssts


async def test_an_input_that_vanished_ends_the_job() -> None:
    """If another process has merged an input, nothing is published, and the outputs are garbage."""
    database = await filled()

    async def rogue() -> None:
        await database.merge(L0, DEEPEST - 1)  # in spite of the reservation

    with pytest.raises(ManifestConflict, match="Nothing was published"):
        await ranged(database, meanwhile=rogue)
    manifest = await database.stored.refresh()
    await check(database)
    assert not reservations(manifest, 0)
    assert LAST_LEVEL not in {info.level for info in manifest.leveled_ssts}
    listed = {info.id.hex() for info in manifest.leveled_ssts}
    assert any(name[7:-4].replace("-", "") not in listed for name in await database.levels())


async def test_a_merge_that_began_before_gives_way() -> None:
    """A compactor's job that began before a reservation is published neither over it nor over its
    result, and this is not an `IllegalState`.
    """
    database = await filled()
    picked_for = await database.stored.refresh()
    version = Version.of(picked_for)
    job = merge_job(version, L0, DEEPEST - 1, 99)
    assert job is not None

    async def late() -> None:
        with pytest.raises(ManifestConflict, match="has reserved an input meanwhile"):
            await database.compactions.run(job, picked_for, version, lambda: False)

    assert (await ranged(database, meanwhile=late)).is_done
    with pytest.raises(ManifestConflict, match="has merged an input meanwhile"):
        await database.compactions.run(job, picked_for, version, lambda: False)
    await check(database)


async def test_writes_and_compactions_go_on_above() -> None:
    """While the range job runs, the compactor merges new commits, and L0 does not fill up."""
    limits = small_settings(l0_trigger_count=2, wal_trigger_bytes=1, base_level_bytes=2_000)
    database, random = await filled(limits=limits), Random(5)
    policy = LeveledPolicy(limits.compactor, limits.levels)
    reserved = 0
    before = {info.level for info in (await database.stored.refresh()).leveled_ssts}
    levels: set[int] = set()
    merges = 0

    async def go_on() -> None:
        nonlocal reserved, merges
        for _ in range(12):
            await database.write(*random_commit(random, 12, 0), time_ms=5)
            while True:
                manifest = await database.stored.refresh()
                (lease,) = reservations(manifest, 0)
                reserved = lease.reserved_seq or 0
                wal = await list_backlog(database.cas, manifest.first_uncompacted_wal_id, 0)
                state = CompactionState(
                    Version.of(manifest), wal, is_hurried=False, reserved_seq=reserved
                )
                job = policy.pick(state)
                if job is None:
                    break
                await database.compactions.run(job, manifest, state.version, lambda: False)
                merges += isinstance(job, MergeJob)
                await check(database)
                levels.update(info.level for info in (await database.stored.refresh()).leveled_ssts)
            assert len(new_runs(state.version, reserved)) <= 5

    assert (await ranged(database, meanwhile=go_on)).is_done
    await check(database)
    assert levels == before
    assert merges > 2
    manifest = await database.stored.refresh()
    assert {i.level for i in manifest.leveled_ssts if i.max_seq <= reserved} == {LAST_LEVEL}


async def test_its_own_edit_is_recognized() -> None:
    """A job recognizes its own edit, even if its outputs were merged before it could check (F2)."""
    database = await filled()
    seen: list[Manifest] = []

    parts = Parts(database)
    before = await database.stored.refresh()
    edit = type(database.stored)._create_next  # noqa: SLF001 - what each edit makes

    async def create(stored: object, current: Manifest, edited: Manifest) -> Manifest | None:
        seen.append(edited)
        return await edit(stored, current, edited)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(database.stored), "_create_next", create)
        await run_range(database.cas, request(database), parts)
    reserved, published, ended = seen
    outputs = [info for part in parts.results for info in part.outputs]
    job = pick_range(Version.of(before), EVERYTHING, reserved_seq=before.last_compacted_seq)
    assert job is not None
    (lease,) = reservations(reserved, 0)
    for result in (RangeResult(job, outputs), RangeResult(job, [])):
        assert not is_range_published(before, result, lease.id)
        assert not is_range_published(reserved, result, lease.id)
        assert is_range_published(published, result, lease.id)
    assert is_range_published(ended, RangeResult(job, outputs), lease.id)
