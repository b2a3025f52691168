"""Retention of the WAL: what is compacted stays for a while, for watches that begin late. Pure.

It is a run without a hole that ends at c: from the oldest object on that is young enough, unless
the run is larger than is allowed. It only ever keeps more than the rules of `core.retention`. The
collector claims it by a lease of its own, so that consumers find in the manifest what they may
claim in turn (`core.wal_lease`). That lease may lag behind the run at first: what was below c
before there was a lease is left alone, but nobody can rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shalekv.core.collectable import Folder, Listed
from shalekv.core.wal_lease import find_wal_lease, first_protected_wal_id, hold_wal, release_wal
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import NEVER

HOLDER = "wal retention"


@dataclass(frozen=True, slots=True)
class WalRetention:
    """How much stays: what was last modified at `young_ms` or later, by the store's clock."""

    young_ms: int
    bytes_max: int


def retained_from(
    manifest: Manifest, listing: Iterable[Listed], retention: WalRetention | None
) -> int:
    """The first WAL object that stays; c itself if none below it does."""
    c = manifest.wal_id_last_compacted or 0
    if retention is None:
        return c
    below = _below(c, listing)
    first, size_bytes = c, 0
    for wal_id in range(c - 1, -1, -1):
        listed = below.get(wal_id)
        if listed is None:
            break
        size_bytes += listed.size_bytes
        if size_bytes > retention.bytes_max:
            break
        if listed.modified_ms >= retention.young_ms:
            first = wal_id
    return first


def retain_wal(manifest: Manifest, wal_id_min: int | None) -> Manifest:
    """The manifest in which the objects from there on are kept, as far as they can be claimed.

    None: nothing is retained.
    """
    if wal_id_min is None:
        return release_wal(manifest, HOLDER)
    found = find_wal_lease(manifest, HOLDER)
    claimed = max(wal_id_min, first_protected_wal_id(manifest))
    if found is not None and found.wal_id_min is not None and claimed <= found.wal_id_min:
        return manifest
    return hold_wal(manifest, HOLDER, claimed, NEVER)


def _below(c: int, listing: Iterable[Listed]) -> Mapping[int, Listed]:
    return {
        listed.number: listed
        for listed in listing
        if listed.folder is Folder.WAL and listed.number is not None and listed.number < c
    }
