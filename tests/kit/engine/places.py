"""Databases in memory that find each other by their URLs, as a clone has to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from shalekv.errors import SnapshotNotFound
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.jobs.clone import CloneJob, CloneReport
from shalekv.jobs.collect import CollectJob, CollectReport
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.audit import Finding
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.read.scan import scan_slices
from shalekv.read.version import ReadView
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.server.service import Call
from shalekv.settings import (
    KIB,
    CollectorSettings,
    CompactorConfig,
    CompactorSettings,
    LevelSettings,
    StoreSettings,
)
from shalekv.store.api import Created, ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryStore, named_objects
from shalekv.v1 import kv_pb2
from shalekv.write.snapshots import Snapshots
from tests.kit.processes.in_process import real_runtime, running, serve_settings, wall_clock_ms

HOUR_MS = 3_600_000
BATCH_BYTES = 64 * KIB  # a batch above this becomes a load

Row = tuple[bytes, bytes, int]  # key, value, sequence number
_numbers = count()


class Place:
    """One database, and the processes that come and go."""

    def __init__(self, name: str) -> None:
        """There is nothing yet; no other place of this run has the same URL."""
        self.name = f"{name}-{next(_numbers)}"
        self.url = f"memory://{self.name}"
        self.store: ObjectStore = self.store_at(0)
        self._seed = 0

    def store_at(self, ahead_ms: int) -> MemoryStore:
        return MemoryStore(
            lambda: wall_clock_ms() + ahead_ms, name=self.name, objects=named_objects(self.name)
        )

    def cas(self, runtime: Runtime, store: ObjectStore | None = None) -> CasStore:
        return CasStore(store or self.store, runtime, StoreSettings())

    def seed(self) -> int:
        self._seed += 1
        return hash(self.name) ^ self._seed

    async def put(self, *keys: bytes, value: bytes = b"value") -> None:
        """A writer opens it, puts each of these keys by a commit of its own, and goes."""
        changes = [[kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value))] for key in keys]
        await self.write(*changes)

    async def write(self, *batches: Sequence[kv_pb2.Change]) -> None:
        settings = serve_settings(writer={"direct_ingest_bytes": BATCH_BYTES})
        with real_runtime(seed=self.seed()) as runtime:
            async with running(self.store, settings, runtime) as writer:
                for changes in batches:
                    answer = writer.kv.write(kv_pb2.WriteRequest(changes=changes), Call())
                    if not isinstance(answer, kv_pb2.WriteReply):
                        await answer
            await writer.release()

    async def rows(self) -> list[Row]:
        """All that a writer reads which opens it now."""
        with real_runtime(seed=self.seed()) as runtime:
            async with running(self.store, serve_settings(), runtime) as writer:
                view = await writer.engine.committed_view()
                found = await _scanned(view, writer.engine.time.now_ms())
            await writer.release()
            return found

    async def rows_at(self, snapshot_id: bytes) -> list[Row] | None:
        """All that a writer which opens it now reads at a snapshot; None: that is gone."""
        found = None
        with real_runtime(seed=self.seed()) as runtime:
            async with running(self.store, serve_settings(), runtime) as writer:
                with suppress(SnapshotNotFound):
                    opened = await writer.engine.snapshots.open(snapshot_id)
                    found = await _scanned(opened.view, opened.now_ms)
            await writer.release()
        return found

    async def open(self) -> None:
        await self.rows()

    async def compact(self, **settings: Any) -> None:
        """A compactor merges all that is there, in small SSTs, and goes."""
        compactor = {"wal_trigger_age_ms": 0, "l0_trigger_count": 1}
        chosen = CompactorConfig(
            levels=LevelSettings(sst_bytes=64 * KIB, block_bytes=1 * KIB),
            compactor=CompactorSettings.model_validate(compactor | settings),
        )
        with real_runtime(seed=self.seed()) as runtime:
            running_one = await Compactor.open(
                self.store, settings=chosen, runtime=runtime, hurry=asyncio.Event()
            )
            await running_one.run(is_once=True)
            await running_one.close()

    async def collect(self, *, ahead_ms: int = 2 * HOUR_MS) -> CollectReport:
        """A collector deletes what is not needed so much later, however young it is."""
        ages = {"collect_age_s": 0, "foreign_file_age_s": 0, "wal_retention_s": 0}
        settings = CollectorSettings.model_validate(ages)
        with real_runtime(seed=self.seed()) as runtime:
            cas = self.cas(runtime, self.store_at(ahead_ms))
            return await CollectJob(cas, settings).collect()

    async def clone_to(self, target: Place, called: str = "") -> CloneReport:
        with real_runtime(seed=self.seed()) as runtime:
            return await CloneJob(self.cas(runtime), target.store).run(called)

    async def snapshot(self, name: str) -> Snapshot:
        with real_runtime(seed=self.seed()) as runtime:
            return await Snapshots(self.cas(runtime)).create(name=name, ttl_ms=HOUR_MS)

    async def manifest(self) -> Manifest:
        with real_runtime(seed=self.seed()) as runtime:
            return await StoredManifest(self.cas(runtime)).refresh()

    async def replace_manifest(self, **fields: Any) -> None:
        """Publish a manifest that differs from the current one in these."""
        current = await self.manifest()
        edited = replace(current, manifest_id=current.manifest_id + 1, **fields)
        name = names.manifest_name(edited.manifest_id)
        assert await self.store.create(name, encode_manifest(edited)) == Created()

    async def pins(self) -> list[Snapshot]:
        """The snapshots that keep SSTs for clones, as they are called."""
        manifest = await self.manifest()
        return [each for each in manifest.snapshots if each.name.startswith("clone ")]

    async def damage(self) -> list[Finding]:
        with real_runtime(seed=self.seed()) as runtime:
            fsck = Fsck(self.cas(runtime), is_deep=True)
            return [each async for each in fsck.findings() if each.kind.is_damage]

    async def ssts(self) -> set[bytes]:
        """The ids of the SSTs in its own folder."""
        infos = [info async for info in self.store.list(names.LEVELS_FOLDER)]
        ids = {names.parse_level_name(info.name) for info in infos}
        return {sst_id for sst_id in ids if sst_id is not None}


def puts(keys: Sequence[bytes], value: bytes) -> list[kv_pb2.Change]:
    return [kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value)) for key in keys]


def delete(key: bytes) -> list[kv_pb2.Change]:
    return [kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))]


def delete_range(start: bytes, end: bytes) -> list[kv_pb2.Change]:
    return [
        kv_pb2.Change(
            delete_range=kv_pb2.DeleteRangeChange(range=kv_pb2.KeyRange(start=start, end=end))
        )
    ]


async def everything(name: str = "parent") -> Place:
    """A database with levels, loads, records of both kinds of deletes, and a log above them."""
    parent = Place(name)
    keys = [b"key%03d" % number for number in range(60)]
    await parent.write(puts(keys, b"compacted"), delete(b"key007"))
    await parent.compact()
    load = puts(keys[40:], b"x" * (BATCH_BYTES // 10))
    await parent.write(delete_range(b"key010", b"key020"), load, puts([b"key050"], b"above"))
    await parent.write(puts([b"key015", b"new"], b"in the log"), delete(b"key001"))
    return parent


async def _scanned(view: ReadView, now_ms: int) -> list[Row]:
    slices = scan_slices(view, start=b"", end=b"", reverse=False, now_ms=now_ms)
    return [(e.key, e.value, e.seq) async for part in slices for e in part]
