"""Leases of jobs: list them, find those made by a clock that was ahead, and remove them.

A lease expires by the store's clock. A lease that was made, or renewed, while the maker's clock was
days ahead keeps its objects for that long. What it reserves is not merged, and no job is left to
remove it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shalekv.errors import InvalidRequest
from shalekv.protocol.lease import has_lease, made_ms, without_lease
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.protocol.retention import is_lease_expired
from shalekv.settings import CLOCK_JUMP_MAX_S
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, edit_deadline
from shalekv.write.logical_time import first_time

_MS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease, and its state by the store's clock."""

    lease: Lease
    made_ms: int | None  # None: a lease of WAL objects, whose id does not contain the time
    is_expired: bool
    is_from_the_future: bool  # made by a clock that was ahead


async def list_leases(store: CasStore) -> Sequence[LeaseView]:
    """List all leases of the newest manifest.

    Raises `ImplausibleTime` as an opening does, `DatabaseNotFound`, `CorruptObject`, `StoreError`.
    """
    return await _views(store, await StoredManifest(store).refresh())


async def remove_leases(
    store: CasStore, lease_ids: Collection[bytes], *, is_forced: bool = False
) -> None:
    """Remove leases of jobs: all of them in one edit, or none.

    Raises `InvalidRequest` for an unknown lease, for a lease that is not one of a job, and, unless
    `is_forced`, for one that may belong to a running job. Also raises as `list_leases`, and
    `ManifestConflict`.
    """
    stored = StoredManifest(store)
    views = {view.lease.id: view for view in await _views(store, await stored.refresh())}
    for lease_id in lease_ids:
        _check_removable(lease_id, views.get(lease_id), is_forced=is_forced)

    def edit(manifest: Manifest) -> Manifest:
        for lease_id in lease_ids:
            manifest = without_lease(manifest, lease_id)
        return manifest

    async with edit_deadline(store):
        await stored.edit(edit, lambda m: not any(has_lease(m, each) for each in lease_ids))


async def _views(store: CasStore, manifest: Manifest) -> Sequence[LeaseView]:
    time = await first_time(store, manifest, CLOCK_JUMP_MAX_S)
    now_ms = time.store_now_ms
    latest_ms = now_ms + CLOCK_JUMP_MAX_S * _MS_PER_S
    return [
        LeaseView(
            lease,
            made := made_ms(lease),
            is_expired=is_lease_expired(lease, now_ms / _MS_PER_S),
            is_from_the_future=made is not None and made > latest_ms,
        )
        for lease in manifest.leases
    ]


def _check_removable(lease_id: bytes, view: LeaseView | None, *, is_forced: bool) -> None:
    if view is None:
        raise InvalidRequest("id", f"there is no lease {lease_id.hex()}: nothing was removed")
    if view.made_ms is None:
        problem = (
            f"lease {lease_id.hex()} keeps WAL objects for {view.lease.holder!r}: see "
            "`shalekv consumers delete`. Nothing was removed"
        )
        raise InvalidRequest("id", problem)
    if not (is_forced or view.is_expired or view.is_from_the_future):
        problem = (
            f"lease {lease_id.hex()} of {view.lease.holder!r} may belong to a job that runs, whose "
            "work would be lost: it was not made by a clock that is ahead, and has not expired. "
            "Nothing was removed; if the job has ended, use --force"
        )
        raise InvalidRequest("id", problem)
