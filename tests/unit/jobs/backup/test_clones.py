"""A backup of a clone is complete: it includes what the clone reads from its parent."""

from __future__ import annotations

from shalekv.jobs.backup.create import BackupJob
from shalekv.jobs.backup.repository import Repository
from shalekv.jobs.backup.restore import RestoreJob
from shalekv.store.memory import named_objects
from tests.kit.engine.places import Place, everything
from tests.kit.processes.in_process import real_runtime


async def back_up(source: Place, repository: Place) -> None:
    with real_runtime(seed=source.seed()) as runtime:
        there = Repository(repository.cas(runtime))
        await BackupJob(source.cas(runtime), there).run()


async def restore(repository: Place, target: Place) -> None:
    async def fit() -> None:
        """Accept any store: one in memory is fit."""

    with real_runtime(seed=repository.seed()) as runtime:
        there = Repository(repository.cas(runtime))
        await RestoreJob(there, target.cas(runtime), fit).run(await there.chosen(None))


async def test_clone_is_restored_without_its_parent() -> None:
    """A restored clone equals the clone by scan when clone and parent are gone, also after
    compaction, another backup and cloning.
    """
    parent, clone, repository, target = await everything(), Place("c"), Place("r"), Place("t")
    await parent.clone_to(clone)
    await clone.put(b"own", value=b"of the clone")
    expected = await clone.rows()
    await back_up(clone, repository)
    assert (await clone.manifest()).origins
    for place in (parent, clone):
        objects = named_objects(place.name)
        for folder in ("manifest/", "wal/", "levels/"):
            for info in objects.page(folder, ""):
                objects.remove(info.name)
    await restore(repository, target)
    assert {origin.url for origin in (await target.manifest()).origins} == {""}
    await back_up(target, repository)
    await restore(repository, again := Place("a"))
    await target.clone_to(second := Place("s"))
    for place in (again, second, target):
        assert await place.rows() == expected
        assert await place.damage() == []
    await target.put(b"key002", value=b"anew")
    await target.compact()
    rows = await target.rows()
    assert [row for row in rows if row[0] != b"key002"] == [
        row for row in expected if row[0] != b"key002"
    ]
    assert await target.damage() == []
