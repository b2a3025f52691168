"""Reading a named snapshot with the shipped code, without a server."""

from __future__ import annotations

from shalekv.core.entry import Entry
from shalekv.core.manifest import Snapshot
from shalekv.engine.levels.ssts import LevelSsts
from shalekv.engine.scan import scan_slices
from shalekv.engine.snapshot_views import SnapshotViews
from shalekv.errors import ObjectNotFound
from shalekv.manifest.stored import StoredManifest
from shalekv.settings import CacheSettings, LimitSettings
from shalekv.store.cas import CasStore


async def read_snapshot(
    views: SnapshotViews, snapshot: Snapshot
) -> tuple[int, int, tuple[Entry, ...]]:
    """The number of the last commit, the logical time, and all entries."""
    opened = await views.open(snapshot.id)
    slices = scan_slices(opened.view, start=b"", end=b"", reverse=False, now_ms=opened.now_ms)
    try:
        entries = [entry async for each in slices for entry in each]
    except ObjectNotFound as missing:
        raise await views.explain(missing, snapshot.id) from missing
    return opened.view.seq, opened.now_ms, tuple(entries)


async def new_views(store: CasStore) -> SnapshotViews:
    """What a process knows that has just begun."""
    stored = StoredManifest(store)
    database_id = (await stored.refresh()).database_id
    ssts = LevelSsts(store, database_id=database_id, settings=CacheSettings())
    return SnapshotViews(store, stored, ssts, LimitSettings())
