"""The manifest at the size that the design document reckons with: 100,000 SSTs, 1,000 snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeVar, TypeVarTuple

from shalekv.clock import LoopClock
from shalekv.core.manifest import Manifest, Snapshot
from shalekv.core.sst_table import SstTable
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.manifest.stored import StoredManifest
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.api import Created
from shalekv.store.cas import CasStore
from shalekv.store.counting import CountingStore
from shalekv.store.memory import MemoryStore
from tests.kit.manifests import some_info

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SST_COUNT = 100_000
SNAPSHOT_COUNT = 1_000


class WatchedWorkers(ThreadWorkers):
    """Threads that note what was run in them."""

    def __init__(self) -> None:
        super().__init__(1)
        self.ran: list[str] = []

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        def noted(*values: *Ts) -> T:
            assert threading.current_thread() is not threading.main_thread()
            self.ran.append(function.__name__)
            return function(*values)

        return await super().run(noted, *args)


def large_manifest(random: Random) -> Manifest:
    """A manifest of full size with keys of about 32 bytes."""
    keys = sorted({random.randbytes(32) for _ in range(SST_COUNT + 1)})
    infos = (
        replace(
            some_info(1),
            id=random.randbytes(6) + b"\x70" + bytes(1) + b"\x80" + random.randbytes(7),
            first_key=keys[i],
            last_key=keys[i + 1],
            checksum=random.getrandbits(32),
        )
        for i in range(SST_COUNT)
    )
    snapshots = tuple(
        Snapshot(id=random.randbytes(16), manifest_id=0, snapshot_expire_time_s=1)
        for _ in range(SNAPSHOT_COUNT)
    )
    return Manifest(
        database_id=random.randbytes(16),
        manifest_id=0,
        write_id=random.randbytes(16),
        leveled_ssts=SstTable.from_infos(infos),
        snapshots=snapshots,
    )


async def test_a_large_manifest_is_edited_by_four_requests_and_off_the_loop() -> None:
    """Reading, editing and writing costs list, get, create, list; coding is left to workers."""
    random = Random(1)
    store = CountingStore(MemoryStore(lambda: 0, name="large"))
    data = encode_manifest(large_manifest(random))
    assert await store.create(names.manifest_name(0), data) == Created()
    before = {operation: count.requests for operation, count in store.counts.items()}
    workers = WatchedWorkers()
    runtime = Runtime(LoopClock(), random, workers)
    stored = StoredManifest(CasStore(store, runtime, StoreSettings()))
    added = Snapshot(id=random.randbytes(16), manifest_id=1, snapshot_expire_time_s=2)

    edited = await stored.edit(
        lambda m: replace(m, snapshots=(*m.snapshots, added)), lambda m: added in m.snapshots
    )
    workers.close()

    asked = {
        operation.value: count.requests - before.get(operation, 0)
        for operation, count in store.counts.items()
    }
    assert {name: count for name, count in asked.items() if count} == {
        "list": 2,
        "get": 1,
        "create": 1,
    }
    assert workers.ran == ["decode_manifest", "encode_manifest"]
    assert len(edited.leveled_ssts) == SST_COUNT
    assert edited.snapshots[-1] == added
