"""A database in memory with real objects, and every operation that makes garbage in it.

Jobs are plain edits here, so that these tests depend on the rules of the protocol alone: a
published SST has a lease, which the publishing edit checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Self

from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.format.manifest import decode_manifest
from shalekv.format.sst import open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.jobs.collect import CollectJob
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.lease import (
    RANDOM_BYTES,
    check_lease,
    has_lease,
    leased_sst_id,
    new_lease_id,
    with_lease,
    without_lease,
)
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.protocol.snapshot import is_expired
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.server.database import create_database
from shalekv.settings import CollectorSettings, StoreSettings
from shalekv.store.api import ObjectInfo, ObjectStore, StoredObject
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.watch.consumers import ConsumerLeases
from shalekv.write.snapshots import Snapshots
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.store import STORE_NOW_MS

AGE_S = 10  # age from which these collectors delete
TTL_S = 60


class CollectedDatabase:
    """One database, its clock, and what happens to it."""

    def __init__(self, seed: int = 0) -> None:
        self.now_ms = STORE_NOW_MS
        self.objects = MemoryObjects()
        self.store: ObjectStore = self.another_store()
        self.random = Random(seed)
        self.last_wal_id = -1
        self.last_seq = 0
        self.database_id = bytes(16)

    @classmethod
    async def created(cls, seed: int = 0) -> Self:
        database = cls(seed)
        await create_database(database.store, yielding_runtime(seed), StoreSettings())
        database.database_id = (await database.manifest()).database_id
        return database

    def copy(self) -> CollectedDatabase:
        """The same database once more, which goes its own way."""
        copied = CollectedDatabase()
        copied.random.setstate(self.random.getstate())
        copied.now_ms, copied.database_id = self.now_ms, self.database_id
        copied.last_wal_id, copied.last_seq = self.last_wal_id, self.last_seq
        for name in self.names():
            found = self.objects.find(name)
            assert found is not None
            copied.objects.add(found)
        return copied

    def another_store(self) -> MemoryStore:
        return MemoryStore(lambda: self.now_ms, objects=self.objects)

    def cas(self, store: ObjectStore | None = None) -> CasStore:
        """The store as a process of its own sees it."""
        runtime = yielding_runtime(self.random.getrandbits(64))
        return CasStore(store or self.store, runtime, StoreSettings())

    def collecting(self, store: ObjectStore | None = None, **settings: Any) -> CollectJob:
        ages = {
            "collect_age_s": AGE_S,
            "foreign_file_age_s": AGE_S,
            "wal_retention_s": 0,
        } | settings
        return CollectJob(self.cas(store), CollectorSettings.model_validate(ages))

    def consumers(self, store: ObjectStore | None = None, *, ttl_s: int = TTL_S) -> ConsumerLeases:
        cas = self.cas(store)
        return ConsumerLeases(cas, StoredManifest(cas), ttl_s)

    def snapshots(self, store: ObjectStore | None = None) -> Snapshots:
        return Snapshots(self.cas(store))

    def pass_time(self, seconds: float = AGE_S + 1) -> None:
        """Move the store's clock; by default, all that is there is old enough afterwards."""
        self.now_ms += round(seconds * 1_000)

    @property
    def now_s(self) -> float:
        return self.now_ms / 1_000

    # --- what makes objects --------------------------------------------------------------------

    async def wal(self, count: int = 1) -> None:
        for _ in range(count):
            self.last_seq += 1
            await self._fill([Entry(b"k%d" % self.last_seq, self.last_seq, Kind.PUT, b"v")])

    async def fence(self) -> None:
        await self._fill([])

    async def _fill(self, entries: Sequence[Entry]) -> None:
        self.last_wal_id += 1
        name = names.wal_name(self.last_wal_id)
        await self.store.create(name, self._encoded(name, entries))

    async def lease(self, ttl_s: int = TTL_S, *, wal_id_min: int | None = None) -> Lease:
        lease_id = new_lease_id(self.now_ms, self.random.randbytes(RANDOM_BYTES))
        lease = Lease(lease_id, int(self.now_s) + ttl_s, "job", wal_id_min)
        await self.edit(lambda m: with_lease(m, lease), lambda m: has_lease(m, lease_id))
        return lease

    async def write_sst(self, lease: Lease, level: int = 1) -> SstInfo:
        """An SST of the levels that no manifest names."""
        sst_id = leased_sst_id(lease.id, self.random.randbytes(8))
        name = names.level_name(sst_id)
        data = self._encoded(name, [Entry(sst_id, 1, Kind.PUT, b"v" * 50)])
        await self.store.create(name, data)
        return open_sst(name, data, database_id=None).footer.info(level)

    def _encoded(self, name: str, entries: Sequence[Entry]) -> bytes:
        properties = SstProperties(
            name=name,
            database_id=self.database_id,
            writer_epoch=1,
            writer_nonce=bytes(16),
            write_id=self.random.randbytes(16),
        )
        return encode_sst(properties, entries, block_bytes=64)

    # --- what edits the manifest ---------------------------------------------------------------

    async def edit(
        self,
        edit: Callable[[Manifest], Manifest],
        landed: Callable[[Manifest], bool] = lambda _: True,
        store: ObjectStore | None = None,
    ) -> Manifest:
        """Edit the manifest as a process without a cached state does."""
        return await StoredManifest(self.cas(store)).edit(edit, landed)

    async def publish(
        self,
        lease: Lease,
        *added: SstInfo,
        removed: Sequence[SstInfo] = (),
        c: int | None = None,
        store: ObjectStore | None = None,
    ) -> Manifest:
        """Put SSTs into the levels, as every job does; raises `LeaseLost`. Ends the lease."""

        def edit(manifest: Manifest) -> Manifest:
            check_lease(manifest, lease.id)
            gone = {info.id for info in removed}
            kept = [info for info in manifest.leveled_ssts if info.id not in gone]
            published = replace(manifest, leveled_ssts=SstTable.from_infos([*kept, *added]))
            if c is not None:
                published = replace(published, wal_id_last_compacted=c)
            return without_lease(published, lease.id)

        added_ids = {info.id for info in added}
        return await self.edit(
            edit, lambda m: added_ids <= {info.id for info in m.leveled_ssts}, store
        )

    async def compact(self, c: int) -> SstInfo:
        """Merge the WAL up to `c` into a new SST."""
        lease = await self.lease()
        info = await self.write_sst(lease)
        await self.publish(lease, info, c=c)
        return info

    async def merge(self) -> SstInfo:
        """Merge all SSTs of the levels into a new one."""
        lease = await self.lease()
        info = await self.write_sst(lease)
        manifest = await self.manifest()
        await self.publish(lease, info, removed=[*manifest.leveled_ssts])
        return info

    # --- what there is -------------------------------------------------------------------------

    async def manifest(self) -> Manifest:
        return await StoredManifest(self.cas()).refresh()

    def names(self) -> set[str]:
        folders = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)
        return {info.name for folder in folders for info in self.objects.page(folder, "")}

    async def needed(self) -> set[str]:
        """Return the objects that must exist (I8): all that the manifests reach by the rules."""
        current = await self.manifest()
        unexpired = [s for s in current.snapshots if not is_expired(s, self.now_s)]
        active = {current.manifest_id, *(s.manifest_id for s in unexpired)}
        protected = [lease.wal_id_min for lease in current.leases if lease.wal_id_min is not None]
        first = min(protected, default=self.last_wal_id + 1)
        found = {names.wal_name(n) for n in range(first, self.last_wal_id + 1)}
        for manifest_id in active:
            name = names.manifest_name(manifest_id)
            stored = self.objects.find(name)
            assert stored is not None, f"{name} is active, and gone"
            manifest = decode_manifest(name, stored.data)
            first = manifest.wal_id_last_compacted or 0
            found.add(name)
            found |= {names.wal_name(n) for n in range(first, self.last_wal_id + 1)}
            found |= {names.level_name(info.id) for info in manifest.leveled_ssts}
        return found

    async def check_reachable(self) -> None:
        missing = await self.needed() - self.names()
        assert not missing, sorted(missing)


def save(database: CollectedDatabase, root: Path) -> None:
    """Write the objects as files that are older than any collector asks for."""
    for name in database.names():
        found = database.objects.find(name)
        assert found is not None
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.data)
        os.utime(path, (0, found.info.modified_ms / 1_000))


def load(root: Path, like: CollectedDatabase) -> CollectedDatabase:
    """Read the objects of a folder into a database, to inspect them."""
    database = CollectedDatabase()
    database.last_wal_id = like.last_wal_id
    for path in sorted(root.glob("*/*")):
        data = path.read_bytes()
        info = ObjectInfo(str(path.relative_to(root)), len(data), 0)
        database.objects.add(StoredObject(info, data))
    return database
