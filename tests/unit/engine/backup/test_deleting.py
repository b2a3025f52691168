"""Deleting backups never takes away what another one needs, whoever is at work meanwhile."""

from __future__ import annotations

from contextlib import suppress

import pytest

from shalekv.engine.backup.repository import Repository
from shalekv.errors import BackupBusy, BackupNotFound, CorruptObject
from shalekv.format.backup_names import LEVELS_FOLDER, WAL_FOLDER, Work, parse_mark
from tests.kit.engine.backups import (
    Died,
    Mortal,
    Place,
    back_up,
    backup_ids,
    creation,
    database,
    deletion,
    household,
    restore,
    scanned,
    until_it_lives,
    verify,
    write,
)
from tests.kit.engine.interposed import InterposedStore


def copies(repository: Place) -> set[str]:
    """The names of the copies that are there."""
    return {n for n in repository.names() if n.startswith((LEVELS_FOLDER, WAL_FOLDER))}


async def two_backups() -> tuple[Place, Place]:
    """A database and a repository of two backups of it, between which it was compacted."""
    source, _ = await database()
    repository = Place()
    await back_up(source, repository)
    await write(source, more="1")
    async with household(source) as roles:
        await roles.compact()
    await back_up(source, repository)
    return source, repository


@pytest.mark.parametrize("number", [0, 1])
async def test_what_another_backup_needs_stays(number: int) -> None:
    """What only the deleted one needed goes; the other can be restored."""
    source, repository = await two_backups()
    ids = await backup_ids(repository)
    there = Repository(repository.cas())
    kept = await there.read(ids[1 - number])
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


async def test_nothing_is_left_of_the_last_backup() -> None:
    """The place is empty then."""
    _, repository = await two_backups()
    await deletion(repository).run(await backup_ids(repository))
    assert repository.names() == []


async def test_a_backup_that_is_not_there_is_told() -> None:
    """And none of the others is deleted."""
    _, repository = await two_backups()
    before = repository.names()
    ids = await backup_ids(repository)
    with pytest.raises(BackupNotFound):
        await deletion(repository).run([ids[0], "20260131T040000123Z-00000000"])
    assert repository.names() == before


async def test_no_copy_goes_when_it_cannot_be_read_what_is_needed() -> None:
    """A damaged backup may be deleted itself."""
    _, repository = await two_backups()
    first, second = await backup_ids(repository)
    name = f"backups/{second}.backup"
    repository.overwrite(name, repository.data(name)[:-1])
    before = copies(repository)
    with pytest.raises(CorruptObject):
        await deletion(repository).run([first])
    assert copies(repository) == before
    await deletion(repository).run([second])
    assert repository.names() == []


async def test_what_interrupted_backups_left_is_deleted_when_they_are_abandoned() -> None:
    """Before that it may be that of a backup which is on its way."""
    source, _ = await database()
    repository = Place()
    mortal = Mortal(8, is_late=False)
    with pytest.raises(Died):
        await back_up(source, repository, written=mortal.store(repository))
    left = copies(repository)
    assert left
    deleted = await deletion(repository).run([])
    assert copies(repository) == left
    (reason,) = deleted.left_because
    assert "--abandon" in reason
    deleted = await deletion(repository, is_abandoning=True).run([])
    assert (deleted.objects, deleted.left_because) == (len(left), ())
    assert repository.names() == []


async def test_an_interrupted_deletion_goes_on() -> None:
    """Wherever it ends, what is listed is sound; abandoned and run again, it leaves no garbage."""
    _, original = await two_backups()
    first, second = await backup_ids(original)
    kept = {str(c) for c, _ in (await Repository(original.cas()).read(second)).copies}

    async def run(mortal: Mortal) -> None:
        repository = original.copy()
        there = Repository(repository.cas(mortal.store(repository)))
        with suppress(Died):
            await type(deletion(repository))(there).run([first])
        assert await verify(repository) == []
        again = [each for each in await backup_ids(repository) if each == first]
        await deletion(repository, is_abandoning=True).run(again)
        assert copies(repository) == kept
        assert [name for name in repository.names() if parse_mark(name)] == []

    assert await until_it_lives(run) > 10


@pytest.mark.parametrize("is_abandoning", [False, True])
async def test_a_deletion_at_any_moment_of_a_backup_harms_none(*, is_abandoning: bool) -> None:
    """The backup is whole, or its maker is told; also if it was taken for interrupted."""
    original_source, original = await two_backups()
    _, second = await backup_ids(original)
    outcomes = set()
    at = 0
    while True:
        source, repository = original_source.copy(), original.copy()
        repository.lose(f"backups/{second}.backup")  # its copies are garbage that can be used
        seen = 0

        async def before(
            _operation: str, _name: str, repository: Place = repository, at: int = at
        ) -> None:
            nonlocal seen
            seen += 1
            if seen == at + 1:
                await deletion(repository, is_abandoning=is_abandoning).run([])

        written = InterposedStore(repository.store(), before)
        try:
            await back_up(source, repository, written=written)
            outcomes.add("made")
        except BackupBusy:
            outcomes.add("told")
        assert await verify(repository) == []
        await back_up(source, repository)
        assert await verify(repository) == []
        if seen <= at:
            break
        at += 1
    assert at > 8
    assert outcomes == ({"made", "told"} if is_abandoning else {"made"})


async def test_a_backup_at_any_moment_of_a_deletion_harms_none() -> None:
    """It is told to wait, or is whole; what it counts on is not deleted."""
    original_source, original = await two_backups()
    _, second = await backup_ids(original)
    outcomes = set()
    at = 0
    while True:
        source, repository = original_source.copy(), original.copy()
        seen = 0

        async def before(
            _operation: str,
            _name: str,
            places: tuple[Place, Place] = (source, repository),
            at: int = at,
        ) -> None:
            nonlocal seen
            seen += 1
            if seen == at + 1:
                try:
                    await back_up(*places)
                    outcomes.add("made")
                except BackupBusy:
                    outcomes.add("told")

        there = Repository(repository.cas(InterposedStore(repository.store(), before)))
        await type(deletion(repository))(there).run([second])
        assert await verify(repository) == []
        if seen <= at:
            break
        at += 1
    assert at > 8
    assert outcomes == {"made", "told"}


async def test_a_backup_whose_mark_is_gone_is_taken_back() -> None:
    """Even if that happens when it has been made known already."""
    source, _ = await database()
    repository = Place()

    async def after(operation: str, name: str) -> None:
        if operation == "create" and name.startswith("backups/"):
            for mark in await Repository(repository.cas()).marks():
                assert mark.work is Work.CREATION
                repository.lose(str(mark))

    written = InterposedStore(repository.store(), after=after)
    with pytest.raises(BackupBusy, match="abandoned"):
        await creation(source, repository, written=written).run()
    assert await backup_ids(repository) == []
