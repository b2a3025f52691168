"""Deleting backups never deletes what another backup needs, whatever runs meanwhile."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import BackupBusy, BackupNotFound, CorruptObject
from shalekv.format.backup import LEVELS_FOLDER, WAL_FOLDER, MarkPurpose, parse_mark
from shalekv.jobs.backup.repository import Deletion, Repository
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectStore
from shalekv.store.memory import MemoryStore
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.engine.backups import (
    SEEDS,
    Place,
    back_up,
    backup_ids,
    creation,
    database,
    deletion,
    in_process_cluster,
    restore,
    scanned,
    verify,
    write,
)
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.memory_records import MemoryRecords, Table
from tests.kit.processes.in_process import wall_clock_ms
from tests.kit.store import (
    FaultyStore,
    MortalProcess,
    Request,
    at_each_request,
    at_request,
    dying_at_each_request,
)


def copies(repository: Place) -> set[str]:
    return {n for n in repository.names() if n.startswith((LEVELS_FOLDER, WAL_FOLDER))}


async def two_backups() -> tuple[Place, Place]:
    """Create a database and a repository with two backups of it, one before and one after a
    compaction.
    """
    source, _ = await database()
    repository = Place()
    await back_up(source, repository)
    await write(source, more="1")
    async with in_process_cluster(source) as roles:
        await roles.compact()
    await back_up(source, repository)
    return source, repository


async def test_what_another_backup_needs_stays() -> None:
    """Only the copies that no other backup needs are deleted; the other backup can be restored."""
    source, original = await two_backups()
    ids = await backup_ids(original)
    for number in (0, 1):
        repository = original.copy()
        kept = await Repository(repository.cas()).read(ids[1 - number])
        before = copies(repository)
        deleted = await deletion(repository).run([ids[number]])
        assert copies(repository) == {str(copy) for copy, _ in kept.copies}
        assert (deleted.backups, deleted.objects) == (1, len(before) - len(kept.copies))
        assert deleted.objects > 0
        assert await backup_ids(repository) == [kept.backup_id]
        assert await verify(repository) == []
        await restore(repository, target := Place())
        await target.check()
        assert number or await scanned(target) == await scanned(source)
    await deletion(original).run(ids)
    assert original.names() == []


async def test_deletion_that_cannot_know_what_is_needed_deletes_no_copy() -> None:
    """With an unknown id nothing is deleted; beside a damaged backup no copy is; that backup can be
    deleted itself.
    """
    _, repository = await two_backups()
    before = repository.names()
    first, second = await backup_ids(repository)
    with pytest.raises(BackupNotFound):
        await deletion(repository).run([first, "20260131T040000123Z-00000000"])
    assert repository.names() == before
    name = f"backups/{second}.backup"
    repository.overwrite(name, repository.data(name)[:-1])
    kept = copies(repository)
    with pytest.raises(CorruptObject):
        await deletion(repository).run([first])
    assert copies(repository) == kept
    await deletion(repository).run([second])
    assert repository.names() == []


async def test_copies_of_an_interrupted_backup_go_when_it_is_abandoned() -> None:
    """Copies of an interrupted backup are deleted once it is abandoned; before, they may belong to
    a backup in the making.
    """
    source, _ = await database()
    repository = Place()
    process = MortalProcess(8)
    written = process.store(repository.store())
    assert not await process.run(back_up(source, repository, written=written))
    left = copies(repository)
    assert left
    deleted = await deletion(repository).run([])
    assert copies(repository) == left
    (reason,) = deleted.left_because
    assert "--abandon" in reason
    deleted = await deletion(repository, is_abandoning=True).run([])
    assert (deleted.objects, deleted.left_because) == (len(left), ())
    assert repository.names() == []


async def test_interrupted_deletion_goes_on() -> None:
    """After a deletion that ends at any request, listed backups are sound; abandoned and run again,
    it leaves no garbage.
    """
    _, original = await two_backups()
    first, second = await backup_ids(original)
    kept = {str(c) for c, _ in (await Repository(original.cas()).read(second)).copies}

    async def run(process: MortalProcess) -> None:
        repository = original.copy()
        there = Repository(repository.cas(process.store(repository.store())))
        await process.run(Deletion(there).run([first]))
        assert await verify(repository) == []
        again = [each for each in await backup_ids(repository) if each == first]
        await deletion(repository, is_abandoning=True).run(again)
        assert copies(repository) == kept
        assert [name for name in repository.names() if parse_mark(name)] == []

    assert await dying_at_each_request(run) > 5


@pytest.mark.parametrize("is_abandoning", [False, True])
async def test_deletion_at_any_moment_of_a_backup_harms_none(*, is_abandoning: bool) -> None:
    """A backup during which others are deleted is complete or fails, even if it was treated as
    interrupted.
    """
    original_source, original = await two_backups()
    _, second = await backup_ids(original)
    original.lose(f"backups/{second}.backup")  # its copies are garbage that can be used
    outcomes = set()

    async def run(at: int) -> FaultyStore:
        source, repository = original_source.copy(), original.copy()
        other = deletion(repository, is_abandoning=is_abandoning)
        written = FaultyStore(repository.store(), before=at_request(at, lambda: other.run([])))
        try:
            await back_up(source, repository, written=written)
            outcomes.add("made")
        except BackupBusy:
            outcomes.add("refused")
        assert await verify(repository) == []
        await back_up(source, repository)
        assert await verify(repository) == []
        return written

    assert await at_each_request(run) > 8
    assert outcomes == ({"made", "refused"} if is_abandoning else {"made"})


async def test_backup_at_any_moment_of_a_deletion_harms_none() -> None:
    """A backup during a deletion has to wait, or is complete; the copies that it uses are not
    deleted.
    """
    original_source, original = await two_backups()
    _, second = await backup_ids(original)
    outcomes = set()

    async def run(at: int) -> FaultyStore:
        source, repository = original_source.copy(), original.copy()

        async def make() -> None:
            try:
                await back_up(source, repository)
                outcomes.add("made")
            except BackupBusy:
                outcomes.add("refused")

        store = FaultyStore(repository.store(), before=at_request(at, make))
        await Deletion(Repository(repository.cas(store))).run([second])
        assert await verify(repository) == []
        return store

    assert await at_each_request(run) > 8
    assert outcomes == {"made", "refused"}


async def test_backup_whose_mark_is_gone_is_withdrawn() -> None:
    """A backup whose mark is removed is withdrawn, even if it was published already."""
    source, _ = await database()
    repository = Place()

    async def after(request: Request) -> None:
        if request.operation == "create" and request.name.startswith("backups/"):
            for mark in await Repository(repository.cas()).marks():
                assert mark.work is MarkPurpose.CREATION
                repository.lose(str(mark))

    written = FaultyStore(repository.store(), after=after)
    with pytest.raises(BackupBusy, match="abandoned"):
        await creation(source, repository, written=written).run()
    assert await backup_ids(repository) == []


class TwoPhasePlace(Place):
    """A place where records decide which process has created an object."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Table = {}

    def store(self) -> ObjectStore:
        runtime = Runtime(LoopClock(), Random(next(SEEDS)), InlineWorkers())
        plain = MemoryStore(wall_clock_ms, objects=self.objects)
        return TwoPhaseStore(plain, MemoryRecords(table=self.table), runtime)


async def test_names_are_free_again_when_backups_were_deleted() -> None:
    """Copies that were deleted with a backup are made again for the next one; records do not pile
    up.
    """
    source, _ = await database()
    repository = TwoPhasePlace()
    for _ in range(3):
        made = await back_up(source, repository)
        assert await verify(repository) == []
        await deletion(repository).run(await backup_ids(repository))
        assert repository.names() == []
        assert len(repository.table) < len(made.copies) // 2
