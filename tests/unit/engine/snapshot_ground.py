"""Snapshots of a `Ground`, and the processes that read them."""

from __future__ import annotations

import asyncio
from random import Random

from shalekv.clock import LoopClock
from shalekv.engine.levels.ssts import LevelSsts
from shalekv.engine.scan import scan_slices
from shalekv.engine.snapshot_views import SnapshotViews
from shalekv.engine.view import OpenView
from shalekv.errors import StoreUnavailable
from shalekv.format import names
from shalekv.manifest.stored import StoredManifest
from shalekv.runtime import Runtime
from shalekv.settings import CacheSettings, LimitSettings, StoreSettings
from shalekv.store.api import ObjectStore, StoredObject
from shalekv.store.cas import CasStore
from tests.kit.engine.collection import Ground
from tests.kit.engine.interrupted_store import InterruptedStore
from tests.kit.inline_runtime import InlineWorkers, gathered

Shown = list[tuple[bytes, bytes]]


class GroundClock(LoopClock):
    """Our own clock, which goes as the store's does; waits take no time."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.jumped_ms = 0.0

    def monotonic_ms(self) -> float:
        """Milliseconds since some moment."""
        return self._ground.now_ms - 1_000_000 + self.jumped_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        """Let other tasks run, and time pass."""
        self._ground.now_ms += round(duration_ms)
        await asyncio.sleep(0)


def cas_of(ground: Ground, store: ObjectStore | None = None) -> CasStore:
    """The store as one more process sees it."""
    runtime = Runtime(GroundClock(ground), Random(ground.random.random()), InlineWorkers())
    return CasStore(store or ground.store, runtime, StoreSettings())


async def views_of(
    ground: Ground, store: ObjectStore | None = None, **limits: int
) -> SnapshotViews:
    """One more process that reads snapshots."""
    cas = cas_of(ground, store)
    database_id = (await ground.manifest()).database_id
    ssts = LevelSsts(cas, database_id=database_id, settings=CacheSettings())
    return SnapshotViews(cas, StoredManifest(cas), ssts, LimitSettings.model_validate(limits))


async def shown(opened: OpenView) -> Shown:
    """All that a scan shows."""
    slices = scan_slices(opened.view, start=b"", end=b"", reverse=False, now_ms=opened.now_ms)
    return [(entry.key, entry.value) for part in await gathered(slices) for entry in part]


async def filled(count: int = 3) -> Ground:
    """A database with so many commits in the WAL."""
    ground = await Ground.created()
    await ground.wal(count)
    return ground


def keys(count: int) -> Shown:
    """What so many commits of a `Ground` leave."""
    return [(b"k%d" % number, b"v") for number in range(1, count + 1)]


class CountedStore(InterruptedStore):
    """Counts the requests that read objects, and can hold them."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner, self._nothing)
        self.gets: list[str] = []
        self.may_get = asyncio.Event()
        self.may_get.set()
        self.asked_for_wal = asyncio.Event()
        self.is_away = False

    async def _nothing(self, _number: int) -> None:
        """Nothing comes between."""
        if self.is_away:
            raise StoreUnavailable(self.url, "any", "", "away")

    async def get(self, name: str) -> StoredObject:
        """Noted, and then held."""
        self.gets.append(name)
        if name.startswith(names.WAL_FOLDER):
            self.asked_for_wal.set()
        await self.may_get.wait()
        return await super().get(name)
