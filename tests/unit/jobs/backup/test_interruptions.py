"""Backups and restorations that end at any request, and continue when they are run again."""

from __future__ import annotations

from contextlib import suppress

from shalekv.errors import BackupNotFound, DatabaseNotFound
from shalekv.format import names
from tests.kit.engine.backups import (
    Pairs,
    Place,
    back_up,
    backup_ids,
    creation,
    database,
    restore,
    scanned,
    verify,
)
from tests.kit.store import MortalProcess, dying_at_each_request


async def test_interrupted_backup_goes_on() -> None:
    """A backup that ends at any request is listed only if it is complete; the next one copies only
    the rest.
    """
    original, pairs = await database()
    present = set()

    async def run(process: MortalProcess) -> None:
        source, repository = original.copy(), Place()
        read, written = process.store(source.store()), process.store(repository.store())
        await process.run(back_up(source, repository, read=read, written=written))
        await _check_restores(repository, pairs)  # if there is one, it is whole
        copies = [name for name in repository.names() if name.startswith(("backup_l", "backup_w"))]
        again = creation(source, repository)
        made = await again.run()
        assert again.progress.objects_present == len(copies)
        assert again.progress.objects_copied == len(made.copies) - len(copies)
        present.add(len(copies))
        assert await verify(repository) == []
        if process.dies_at % 4 == 0:
            assert await _check_restores(repository, pairs)
            await source.check()

    assert await dying_at_each_request(run) > 30
    assert present == {*range(max(present) + 1)}


async def test_interrupted_restoration_goes_on() -> None:
    """A restoration that ends at any request leaves no database or a complete one; run again, it is
    equal by scan.
    """
    original, pairs = await database()
    repository = Place()
    await back_up(original, repository)

    async def run(process: MortalProcess) -> None:
        target = Place()
        read, written = process.store(repository.store()), process.store(target.store())
        await process.run(restore(repository, target, read=read, written=written))
        with suppress(DatabaseNotFound):
            await target.manifest()
            assert await scanned(target) == pairs
        await restore(repository, target)
        await target.check()
        if process.dies_at % 4 == 0:
            assert await scanned(target) == pairs

    assert await dying_at_each_request(run) > 20


async def test_the_source_is_only_given_a_snapshot() -> None:
    """A backup writes nothing to the source but manifests, and the last one equals the first."""
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
    """Return whether there is a backup; check that its restoration holds these pairs."""
    target = Place()
    try:
        await restore(repository, target)
    except BackupNotFound:
        assert await backup_ids(repository) == []
        return False
    assert await scanned(target) == pairs
    return True
