"""Merges the whole tail of the WAL into L0, where no compactor runs that would."""

from __future__ import annotations

from shalekv.core.tree import Tree
from shalekv.engine.compaction.backlog import list_backlog
from shalekv.engine.compaction.claiming import claim_compaction
from shalekv.jobs.compact.claim import Leases
from shalekv.jobs.compact.parts import OwnProcessParts
from shalekv.jobs.compact.run import Compactions
from shalekv.manifest.compacted import CompactedManifest
from shalekv.protocol.compaction.jobs import WalJob, WalResult
from shalekv.settings import CompactSettings
from shalekv.store.cas import CasStore


async def merge_tail(store: CasStore, settings: CompactSettings, *, holder: str) -> int:
    """Become the compactor, and merge what the WAL holds now; how many objects that were.

    A compactor that runs is superseded, and ends. Raises `Superseded` when another takes over,
    `DatabaseNotFound`, `LeaseLost`, `CorruptObject` and `StoreError`.
    """
    leases = Leases(store, ttl_s=settings.compactor.compactor_lease_ttl_s, holder=holder)
    manifest = await claim_compaction(store, leases)
    try:
        return await _merge(store, manifest, leases, settings)
    finally:
        await leases.give_up(manifest)


async def _merge(
    store: CasStore, manifest: CompactedManifest, leases: Leases, settings: CompactSettings
) -> int:
    compactions = Compactions(store, manifest, leases, settings, OwnProcessParts(store))
    current = await manifest.refresh()
    wal = await list_backlog(store, current.first_uncompacted_wal_id, 0)
    begin, end = wal.first, wal.first + wal.filled
    while (first := current.first_uncompacted_wal_id) < end:
        job = WalJob(range(first, end), "the whole tail")
        result = await compactions.run(job, current, Tree.of(current), lambda: True)
        assert isinstance(result, WalResult)
        current = await manifest.refresh()
    return end - begin
