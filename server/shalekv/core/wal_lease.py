"""Leases that keep WAL objects, one for each holder: consumers, and the retention. Pure.

A collector that has judged by an older manifest deletes whenever it gets to it (rule F3). So a
lease may only claim what no manifest before it has given up: the slots from c on, and those that
another lease in the same manifest keeps, which was made by this rule itself. Once it is in a
manifest, whatever it claims stays until an edit moves it on or removes it. What has expired and is
still there counts, too: a collector deletes nothing before an edit of its own has removed it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from shalekv.errors import WalUnprotected
from shalekv.protocol.lease import RANDOM_BYTES, new_lease_id
from shalekv.protocol.manifest import Lease, Manifest

_NO_TIME = 2**48 - 1  # no SST's id begins with it: these leases protect none


def first_protected_wal_id(manifest: Manifest) -> int:
    """The WAL objects from here on are there as long as this manifest's claims last: c itself, too.

    What only snapshots keep is not looked at: their manifests tell that.
    """
    kept = (each.wal_id_min for each in manifest.leases if each.wal_id_min is not None)
    return min(manifest.wal_id_last_compacted or 0, *kept, 2**64)


def find_wal_lease(manifest: Manifest, holder: str) -> Lease | None:
    """The lease on WAL objects that has this holder, expired or not."""
    for lease in manifest.leases:
        if lease.holder == holder and lease.wal_id_min is not None:
            return lease
    return None


def hold_wal(manifest: Manifest, holder: str, wal_id_min: int, expire_time_s: int) -> Manifest:
    """The manifest in which `holder` keeps the WAL objects from `wal_id_min` on until then.

    Made anew, or renewed and moved on; never moved back: one that keeps more than is asked for
    lets go of the rest, and one that keeps less stays where it is. Raises `WalUnprotected` when
    there is none, and what is asked for may be deleted at any moment.
    """
    found = find_wal_lease(manifest, holder)
    first = first_protected_wal_id(manifest)
    if found is None and wal_id_min < first:
        raise WalUnprotected(wal_id_min=wal_id_min, first_wal_id=first)
    if found is not None and found.wal_id_min is not None:
        wal_id_min = max(wal_id_min, found.wal_id_min)
    lease = Lease(_lease_id(holder), expire_time_s, holder, wal_id_min)
    others = release_wal(manifest, holder).leases
    return replace(manifest, leases=(*others, lease))


def holds_wal(manifest: Manifest, holder: str, wal_id_min: int, expire_time_s: int) -> bool:
    """Whether the manifest contains that edit, or one that did more (F2)."""
    found = find_wal_lease(manifest, holder)
    if found is None or found.wal_id_min is None:
        return False
    return found.wal_id_min >= wal_id_min and found.expire_time_s >= expire_time_s


def release_wal(manifest: Manifest, holder: str) -> Manifest:
    """The manifest without the lease of this holder, if it is there."""
    kept = tuple(
        each for each in manifest.leases if each.wal_id_min is None or each.holder != holder
    )
    return replace(manifest, leases=kept)


def _lease_id(holder: str) -> bytes:
    """One for each holder, so that two edits at once make one lease."""
    return new_lease_id(_NO_TIME, hashlib.sha256(holder.encode()).digest()[:RANDOM_BYTES])
