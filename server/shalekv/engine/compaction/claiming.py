"""Becoming the compactor of a database."""

from __future__ import annotations

from shalekv.jobs.compact.claim import Leases
from shalekv.manifest.compacted import CompactedManifest
from shalekv.protocol.compaction.publish import (
    CompactorId,
    check_compactor,
    check_unclaimed,
    claim_compactor_epoch,
)
from shalekv.protocol.lease import has_lease, with_lease
from shalekv.protocol.manifest import Manifest
from shalekv.read.origins import check_pins
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

_NONCE_BYTES = 16


async def claim_compaction(
    store: CasStore,
    leases: Leases,
    *,
    after: CompactorId | None = None,
) -> CompactedManifest:
    """Take over from any other compactor, and put a lease for the first job into `leases`.

    With `after`, only from that one, and under its nonce: a process that begins again must not take
    back what another one has taken over meanwhile, and knows its own claim that has landed although
    it has failed.
    Raises `Superseded` when it has, or when another one begins at the same time and wins;
    `DatabaseNotFound`, `OriginLost`, `CorruptObject` and `StoreError`.
    """
    stored = StoredManifest(store)
    seen = await stored.refresh()
    # A lower epoch is that of an older state, put in place of what `after` has compacted.
    is_own = after is not None and seen.compactor_nonce == after.nonce
    if after is not None and seen.compactor_epoch >= after.epoch and not is_own:
        check_compactor(seen, after)
    await check_pins(store, seen)
    nonce = store.runtime.random.randbytes(_NONCE_BYTES) if after is None else after.nonce
    held = await leases.new()

    def claim(current: Manifest) -> Manifest:
        check_unclaimed(current, seen, nonce)
        return with_lease(claim_compactor_epoch(current, nonce), held.lease)

    def landed(current: Manifest) -> bool:
        return current.compactor_nonce == nonce and has_lease(current, held.lease.id)

    claimed = await stored.edit(claim, landed)
    leases.offer(held)
    return CompactedManifest(stored, CompactorId(claimed.compactor_epoch, nonce))
