"""Leases: they protect what a job writes before a manifest names it (rule F3).

A job registers a lease, writes its objects under ids that derive from the lease, and publishes
them by an edit which requires that the lease is still there. The collector removes leases that
have expired by the store's clock, and only then deletes what no manifest names. So whichever
comes first, no published object is deleted; and no clock but the store's matters.

The ids are UUIDs of version 7. All objects of one lease share its first 8 bytes: the time at which
the lease was made, and 12 random bits; the other 62 random bits are their own.
"""

from __future__ import annotations

from dataclasses import replace

from shalekv.errors import LeaseLost
from shalekv.protocol.manifest import Lease, Manifest

_STEM_BYTES = 8  # of a lease's id, shared by its objects
_TAIL_BYTES = 8
_VERSION_7 = 0x70
_VARIANT = 0x80
RANDOM_BYTES = 10  # that `new_lease_id` takes


def new_lease_id(store_now_ms: int, random_bytes: bytes) -> bytes:
    """The id of a new lease: `store_now_ms` by the store's clock, `RANDOM_BYTES` random bytes."""
    stem = store_now_ms.to_bytes(6, "big")
    high = bytes((random_bytes[0] & 0x0F | _VERSION_7, random_bytes[1]))
    return stem + high + _tail(random_bytes[2:])


def made_ms(lease: Lease) -> int | None:
    """When the lease of a job was made, by the clock that its maker went by; None: not told."""
    if lease.wal_id_min is not None:  # its id is made of its holder
        return None
    return int.from_bytes(lease.id[:6], "big")


def leased_sst_id(lease_id: bytes, random_bytes: bytes) -> bytes:
    """The id of an object that the lease protects; `random_bytes` are 8 bytes."""
    return lease_id[:_STEM_BYTES] + _tail(random_bytes)


def protects(lease_id: bytes, sst_id: bytes) -> bool:
    """Whether an object with this id was written under this lease."""
    return lease_id[:_STEM_BYTES] == sst_id[:_STEM_BYTES]


def with_lease(manifest: Manifest, lease: Lease) -> Manifest:
    """The manifest with a new lease. Made again after a conflict, it leaves one lease."""
    others = tuple(each for each in manifest.leases if each.id != lease.id)
    return replace(manifest, leases=(*others, lease))


def renew_lease(manifest: Manifest, lease_id: bytes, expire_time_s: int) -> Manifest:
    """The manifest in which the lease lives until then. Raises `LeaseLost`."""
    check_lease(manifest, lease_id)
    renewed = tuple(
        replace(each, expire_time_s=expire_time_s) if each.id == lease_id else each
        for each in manifest.leases
    )
    return replace(manifest, leases=renewed)


def without_lease(manifest: Manifest, lease_id: bytes) -> Manifest:
    """The manifest without the lease, if it is there."""
    return replace(manifest, leases=tuple(e for e in manifest.leases if e.id != lease_id))


def has_lease(manifest: Manifest, lease_id: bytes) -> bool:
    """Whether the lease is there."""
    return any(lease.id == lease_id for lease in manifest.leases)


def check_lease(manifest: Manifest, lease_id: bytes) -> None:
    """Raise `LeaseLost` unless the lease is there: what it protected may be deleted by now."""
    if not has_lease(manifest, lease_id):
        message = (
            f"lease {lease_id.hex()} is not in manifest {manifest.manifest_id} any more: it has "
            "expired, and what was written under it may be deleted. Nothing was published"
        )
        raise LeaseLost(message)


def _tail(random_bytes: bytes) -> bytes:
    tail = random_bytes[:_TAIL_BYTES]
    return bytes((tail[0] & 0x3F | _VARIANT,)) + tail[1:]
