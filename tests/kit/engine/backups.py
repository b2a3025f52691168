"""A database, a repository of its backups, and a place to restore them to, all in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from random import Random
from typing import Any

from shalekv.clock import LoopClock
from shalekv.format import backup, names
from shalekv.format.backup import Backup
from shalekv.jobs.backup.copy import CopyLimits, Damage, VerifyJob
from shalekv.jobs.backup.create import BackupJob
from shalekv.jobs.backup.repository import Deletion, Repository
from shalekv.jobs.backup.restore import RestoreJob
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.manifest import Manifest
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore, StoredObject
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.in_process_cluster import InProcessCluster, everything, write_all
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.processes.in_process import real_runtime, wall_clock_ms

FOLDERS = (  # folders of databases, and of repositories
    *(names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER, names.ACCESS_FOLDER),
    backup.BACKUPS_FOLDER,
    *(backup.WAL_FOLDER, backup.LEVELS_FOLDER, backup.MARKS_FOLDER),
)
Pairs = dict[bytes, bytes]
SEEDS = count()  # every process draws numbers of its own


class Place:
    """Objects in memory, as one or another process sees them."""

    def __init__(self, objects: MemoryObjects | None = None) -> None:
        self.objects = MemoryObjects() if objects is None else objects

    def store(self) -> ObjectStore:
        return MemoryStore(wall_clock_ms, objects=self.objects)

    def cas(self, store: ObjectStore | None = None) -> CasStore:
        """The store of one more process, or a store as one more process sees it."""
        runtime = Runtime(LoopClock(), Random(next(SEEDS)), InlineWorkers())
        return CasStore(store or self.store(), runtime, StoreSettings())

    def names(self) -> list[str]:
        return [info.name for folder in FOLDERS for info in self.objects.page(folder, "")]

    def data(self, name: str) -> bytes:
        return self._find(name).data

    def copy(self) -> Place:
        copied = MemoryObjects()
        for name in self.names():
            copied.add(self._find(name))
        return Place(copied)

    def overwrite(self, name: str, data: bytes) -> None:
        info = self._find(name).info
        self.objects.replace(StoredObject(type(info)(name, len(data), info.modified_ms), data))

    def lose(self, *gone: str) -> None:
        for name in gone:
            self.objects.remove(name)

    async def manifest(self) -> Manifest:
        """The current manifest of the database that is here."""
        return await StoredManifest(self.cas()).refresh()

    async def check(self) -> None:
        """The database that is here is sound, and has nothing that nothing names."""
        assert await gathered(Fsck(self.cas(), is_deep=True).findings()) == []

    def _find(self, name: str) -> StoredObject:
        found = self.objects.find(name)
        assert found is not None, name
        return found


@asynccontextmanager
async def in_process_cluster(place: Place) -> AsyncIterator[InProcessCluster]:
    with real_runtime(seed=next(SEEDS)) as runtime:
        roles = InProcessCluster(place.store, runtime, tick_ms=0)
        yield roles
        await roles.close()


_MADE: list[tuple[Place, Pairs]] = []  # the database that is made once, as it was then


async def database() -> tuple[Place, Pairs]:
    """A copy of one database, and what a scan of it shows."""
    if not _MADE:
        _MADE.append(await new_database())
    place, pairs = _MADE[0]
    return place.copy(), dict(pairs)


async def new_database() -> tuple[Place, Pairs]:
    """A database with SSTs on several levels and a WAL, and what a scan of it shows."""
    place = Place()
    async with in_process_cluster(place) as roles:
        await roles.create()
        for round_ in range(3):
            async with roles.writing() as writer:
                for batch in range(3):
                    pairs = {b"%d-%d-%d" % (n % 7, batch, n): b"v%d" % round_ for n in range(20)}
                    await write_all(writer, pairs)
            if round_ < 2:
                await roles.compact()
        await roles.collect()
    return place, await scanned(place)


async def write(place: Place, **pairs: str) -> None:
    async with in_process_cluster(place) as roles, roles.writing() as writer:
        for key, value in pairs.items():
            await write_all(writer, {key.encode(): value.encode()})


async def scanned(place: Place) -> Pairs:
    """Return what a scan of a copy of the database shows; the place itself is not changed."""
    async with in_process_cluster(place.copy()) as roles, roles.writing() as writer:
        return await everything(writer)


async def back_up(source: Place, repository: Place, **options: Any) -> Backup:
    """Make a backup, by a process of its own; the options are those of `creation`."""
    return await creation(source, repository, **options).run()


def creation(
    source: Place,
    repository: Place,
    *,
    read: ObjectStore | None = None,
    written: ObjectStore | None = None,
) -> BackupJob:
    there = Repository(repository.cas(written))
    return BackupJob(source.cas(read), there, limits=CopyLimits(parallel=2))


async def restore(
    repository: Place,
    target: Place,
    *,
    backup_id: str | None = None,
    read: ObjectStore | None = None,
    written: ObjectStore | None = None,
) -> Manifest:
    """Restore a backup, the newest by default, by a process of its own."""
    there = Repository(repository.cas(read))
    restoration = RestoreJob(there, target.cas(written), _fit)
    return await restoration.run(await there.chosen(backup_id))


async def _fit() -> None:
    """A store in memory is fit."""


async def verify(repository: Place) -> list[Damage]:
    there = Repository(repository.cas())
    return await VerifyJob(there).run(await there.ids())


def deletion(repository: Place, *, is_abandoning: bool = False) -> Deletion:
    return Deletion(Repository(repository.cas()), is_abandoning=is_abandoning)


async def backup_ids(repository: Place) -> list[str]:
    return await Repository(repository.cas()).ids()
