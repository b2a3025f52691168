"""A database in memory that is opened, written to and damaged at will."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Self

from shalekv.format import names
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.transaction import Change
from shalekv.runtime import Runtime
from shalekv.server.database import create_database
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.api import Created, ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.write.commit import Commit, WalContents
from shalekv.write.opening import open_log
from shalekv.write.recovery import RecoveredLog
from shalekv.write.wal import ObjectStoreWal
from tests.kit.engine.commits import commit_of, group_of, nothing_compacted, read
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.inline_runtime import gathered
from tests.kit.store import STORE_NOW_MS


class Database:
    """Objects in memory, and what is done to them from outside of any writer."""

    def __init__(self, seed: int = 0) -> None:
        self.objects = MemoryObjects()
        self.store = self.another_store()
        self._seeds = Random(seed)  # every process draws nonces of its own

    @classmethod
    async def created(cls, seed: int = 0) -> Self:
        database = cls(seed)
        await create_database(database.store, database.runtime(), StoreSettings())
        return database

    def runtime(self) -> Runtime:
        return yielding_runtime(self._seeds.getrandbits(64))

    def another_store(self) -> MemoryStore:
        return MemoryStore(lambda: STORE_NOW_MS, objects=self.objects)

    async def open(
        self, store: ObjectStore | None = None, *, k: int = 1, **settings: Any
    ) -> RecoveredLog:
        """Open it for writing with `k` uploads in flight."""
        writer = WriterSettings.model_validate({"max_parallel_writes": k} | settings)
        cas = CasStore(store or self.store, self.runtime(), StoreSettings())
        return await open_log(cas, writer, address="here:1")

    async def manifest(self) -> Manifest:
        cas = CasStore(self.store, self.runtime(), StoreSettings())
        return await StoredManifest(cas).refresh()

    async def edit(self, edit: Callable[[Manifest], Manifest]) -> Manifest:
        """Put an edited manifest in the place after the current one."""
        current = await self.manifest()
        edited = replace(edit(current), manifest_id=current.manifest_id + 1)
        name = names.manifest_name(edited.manifest_id)
        assert await self.store.create(name, encode_manifest(edited)) == Created()
        return edited

    async def fill(self, wal_id: int, owner: WriterId, seq: int = 0, *changes: Change) -> None:
        """Put an object of `owner` into a slot: a fence, or one commit."""
        commits = [commit_of(seq, *changes)] if changes else []
        await self.fill_with(wal_id, owner, *commits)

    async def fill_with(self, wal_id: int, owner: WriterId, *commits: Commit) -> None:
        """Put an object of `owner` with these commits into a slot; none: a fence."""
        cas = CasStore(self.store, self.runtime(), StoreSettings())
        slots = ObjectStoreWal(
            cas,
            owner,
            database_id=(await self.manifest()).database_id,
            block_bytes=64,
            now_ms=lambda: STORE_NOW_MS,
            last_compacted=nothing_compacted,
        )
        filling = group_of(wal_id, *commits).contents() if commits else WalContents()
        assert await slots.create(wal_id, filling) is None

    async def wal(self) -> list[int]:
        infos = await gathered(self.store.list(names.WAL_FOLDER))
        ids = [names.parse_wal_name(info.name) for info in infos]
        return [wal_id for wal_id in ids if wal_id is not None]

    async def remove(self, *removed: str) -> None:
        """Delete objects, as a collector does or a careless hand."""
        await self.store.delete(removed)

    async def overwrite(self, name: str, data: bytes) -> None:
        await self.store.delete([name])
        await self.store.create(name, data)

    def data(self, name: str) -> bytes:
        found = self.objects.find(name)
        assert found is not None
        return found.data

    def manifest_at(self, manifest_id: int) -> Manifest:
        name = names.manifest_name(manifest_id)
        return decode_manifest(name, self.data(name))


def contents(opened: RecoveredLog) -> list[tuple[bytes, bytes]]:
    return read(opened.memtable.view(opened.last_seq, opened.last_wal_id))
