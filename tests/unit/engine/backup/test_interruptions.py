"""Backups and restorations that end at any request, and go on when they are run again."""

from __future__ import annotations

from contextlib import suppress

from shalekv.errors import BackupNotFound, DatabaseNotFound
from shalekv.format import names
from tests.kit.engine.backups import (
    Died,
    Mortal,
    Pairs,
    Place,
    back_up,
    backup_ids,
    creation,
    database,
    restore,
    scanned,
    until_it_lives,
    verify,
)


async def test_an_interrupted_backup_goes_on() -> None:
    """Wherever it ends, it is no backup unless it is whole, and the next one is equal by scan."""
    original, pairs = await database()

    async def run(mortal: Mortal) -> None:
        source, repository = original.copy(), Place()
        read, written = mortal.store(source), mortal.store(repository)
        with suppress(Died):
            await back_up(source, repository, read=read, written=written)
        await _check_restores(repository, pairs)  # if there is one, it is whole
        await back_up(source, repository)
        assert await verify(repository) == []
        assert await _check_restores(repository, pairs)
        await source.check()

    assert await until_it_lives(run) > 60


async def test_what_an_interrupted_backup_has_copied_is_not_copied_again() -> None:
    """Each death has left one copy more, up to all."""
    original, _ = await database()
    left = []

    async def run(mortal: Mortal) -> None:
        source, repository = original.copy(), Place()
        with suppress(Died):
            await back_up(source, repository, written=mortal.store(repository))
        there = [name for name in repository.names() if name.startswith(("backup_l", "backup_w"))]
        again = creation(source, repository)
        made = await again.run()
        assert again.progress.objects_present == len(there)
        assert again.progress.objects_copied == len(made.copies) - len(there)
        left.append((len(there), len(made.copies)))

    await until_it_lives(run)
    (total,) = {total for _, total in left}
    assert {there for there, _ in left} == {*range(total + 1)}


async def test_an_interrupted_restoration_goes_on() -> None:
    """Wherever it ends, there is no database or the whole one; run again, it is equal by scan."""
    original, pairs = await database()
    repository = Place()
    await back_up(original, repository)

    async def run(mortal: Mortal) -> None:
        target = Place()
        read, written = mortal.store(repository), mortal.store(target)
        with suppress(Died):
            await restore(repository, target, read=read, written=written)
        with suppress(DatabaseNotFound):
            await target.manifest()
            assert await scanned(target) == pairs
        await restore(repository, target)
        assert await scanned(target) == pairs
        await target.check()

    assert await until_it_lives(run) > 40


async def test_the_source_is_only_given_a_snapshot() -> None:
    """Nothing but its manifest is written, and it says in the end what it said before."""
    source, _ = await database()
    before = source.copy()
    manifest = await source.manifest()
    await back_up(source, Place())
    added = {*source.names()} - {*before.names()}
    assert all(name.startswith(names.MANIFEST_FOLDER) for name in added)
    assert all(source.data(name) == before.data(name) for name in before.names())
    assert (await source.manifest()).snapshots == manifest.snapshots
    await source.check()


async def _check_restores(repository: Place, pairs: Pairs) -> bool:
    """Whether there is a backup; what is restored of it shows these pairs."""
    target = Place()
    try:
        await restore(repository, target)
    except BackupNotFound:
        assert await backup_ids(repository) == []
        return False
    assert await scanned(target) == pairs
    return True
