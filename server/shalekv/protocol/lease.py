"""Leases: of jobs, on WAL objects, and of the elected writer. Pure.

The lease of a *job* protects the objects that it writes before a manifest names them (F3). The job
registers a lease, writes its objects under ids that derive from the lease, and publishes them by an
edit which requires that the lease is still in the manifest. The collector removes leases that have
expired by the store's clock, and only then deletes objects that no manifest names. So whichever
comes first, no published object is deleted, and no clock but the store's matters. The ids are UUIDs
of version 7. All objects of one lease share its first 8 bytes: the time at which the lease was
made, and 12 random bits. The other 62 random bits differ.

A lease on *WAL objects* keeps them from one id on, one lease for each holder: consumers, and the
retention of the collector. A collector that has judged by an older manifest may delete at any later
time (F3). So a lease may only protect objects that no manifest before it has given up: those from c
on, and those that another such lease in the same manifest keeps. Once it is in a manifest, the
objects stay until an edit moves the lease on or removes it. A lease that has expired but is still
in the manifest counts too, since a collector deletes nothing before its own edit has removed it.

The *election* lease (`ElectionLease`) is that of the process that acts as the writer. Two clocks
are never compared; each process goes by its own:

    holder       sends a renewal ------- gives up, HOLD_SHARE of the TTL later
    candidate           sees that renewal ------------- may take over, one whole TTL later

A candidate sees a renewal after it was sent. So the holder gives up before a candidate takes over,
as long as no clock runs faster than another by more than `HOLD_SHARE` allows for. Only availability
depends on it: two processes that both hold a lease are kept apart by their epochs (I3).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from shalekv.errors import LeaseLost, WalUnprotected
from shalekv.protocol.manifest import Lease, Manifest

_STEM_BYTES = 8  # of a lease's id, shared by its objects
_TAIL_BYTES = 8
_VERSION_7 = 0x70
_VARIANT = 0x80
RANDOM_BYTES = 10  # length of the random bytes of `new_lease_id`
_NO_TIME = 2**48 - 1  # no SST id begins with it: leases on WAL objects protect no SST
HOLD_SHARE = 0.9  # of the TTL: a holder that has not renewed for so long has lost its lease
RENEWALS = 3  # attempts to renew within a TTL
POLLS = 10  # least number of polls of a candidate within a TTL
OVER_MS = 1  # margin after the end of a lease, for the rounding of clocks
KEPT = 8  # leases kept before the current one, for candidates that are reading them


def new_lease_id(store_now_ms: int, random_bytes: bytes) -> bytes:
    """Return the id of a new lease, of the store's time and `RANDOM_BYTES` random bytes."""
    stem = store_now_ms.to_bytes(6, "big")
    high = bytes((random_bytes[0] & 0x0F | _VERSION_7, random_bytes[1]))
    return stem + high + _tail(random_bytes[2:])


def made_ms(lease: Lease) -> int | None:
    """Return when a job's lease was made, by the store's clock; None for a lease on the WAL."""
    if lease.wal_id_min is not None:  # its id is a hash of its holder
        return None
    return int.from_bytes(lease.id[:6], "big")


def leased_sst_id(lease_id: bytes, random_bytes: bytes) -> bytes:
    """Return the id of a new object that the lease protects; `random_bytes` are 8 bytes."""
    return lease_id[:_STEM_BYTES] + _tail(random_bytes)


def protects(lease_id: bytes, sst_id: bytes) -> bool:
    """Return whether an object with this id was written under this lease."""
    return lease_id[:_STEM_BYTES] == sst_id[:_STEM_BYTES]


def with_lease(manifest: Manifest, lease: Lease) -> Manifest:
    """Return the manifest with a new lease. A repeated edit, after a conflict, leaves one lease."""
    others = tuple(each for each in manifest.leases if each.id != lease.id)
    return replace(manifest, leases=(*others, lease))


def renew_lease(manifest: Manifest, lease_id: bytes, expire_time_s: int) -> Manifest:
    """Return the manifest in which the lease expires at `expire_time_s`. Raises `LeaseLost`."""
    check_lease(manifest, lease_id)
    renewed = tuple(
        replace(each, expire_time_s=expire_time_s) if each.id == lease_id else each
        for each in manifest.leases
    )
    return replace(manifest, leases=renewed)


def without_lease(manifest: Manifest, lease_id: bytes) -> Manifest:
    """Return the manifest without the lease, if it is there."""
    return replace(manifest, leases=tuple(e for e in manifest.leases if e.id != lease_id))


def has_lease(manifest: Manifest, lease_id: bytes) -> bool:
    """Return whether the manifest has the lease."""
    return any(lease.id == lease_id for lease in manifest.leases)


def check_lease(manifest: Manifest, lease_id: bytes) -> None:
    """Raise `LeaseLost` unless the manifest has the lease: its objects may be deleted by now."""
    if not has_lease(manifest, lease_id):
        message = (
            f"lease {lease_id.hex()} is not in manifest {manifest.manifest_id} any more: it has "
            "expired, and what was written under it may be deleted. Nothing was published"
        )
        raise LeaseLost(message)


def first_protected_wal_id(manifest: Manifest) -> int:
    """Return the first WAL object that this manifest or one of its leases keeps: at most c.

    Objects that only snapshots keep are not considered, which depends on their manifests.
    """
    kept = (each.wal_id_min for each in manifest.leases if each.wal_id_min is not None)
    return min(manifest.wal_id_last_compacted or 0, *kept, 2**64)


def find_wal_lease(manifest: Manifest, holder: str) -> Lease | None:
    """Return the lease on WAL objects of this holder, expired or not."""
    for lease in manifest.leases:
        if lease.holder == holder and lease.wal_id_min is not None:
            return lease
    return None


def hold_wal(manifest: Manifest, holder: str, wal_id_min: int, expire_time_s: int) -> Manifest:
    """Return the manifest in which `holder` keeps the WAL objects from `wal_id_min` on.

    The lease expires at `expire_time_s`. It is created, or renewed and moved to `wal_id_min`, but
    never moved back: one that begins later already stays where it is. Raises `WalUnprotected` if
    there is no lease yet and object `wal_id_min` may be deleted at any moment.
    """
    found = find_wal_lease(manifest, holder)
    first = first_protected_wal_id(manifest)
    if found is None and wal_id_min < first:
        raise WalUnprotected(wal_id_min=wal_id_min, first_wal_id=first)
    if found is not None and found.wal_id_min is not None:
        wal_id_min = max(wal_id_min, found.wal_id_min)
    lease = Lease(_wal_lease_id(holder), expire_time_s, holder, wal_id_min)
    others = release_wal(manifest, holder).leases
    return replace(manifest, leases=(*others, lease))


def holds_wal(manifest: Manifest, holder: str, wal_id_min: int, expire_time_s: int) -> bool:
    """Return whether the manifest contains the edit `hold_wal` or a later one of this holder
    (F2).
    """
    found = find_wal_lease(manifest, holder)
    if found is None or found.wal_id_min is None:
        return False
    return found.wal_id_min >= wal_id_min and found.expire_time_s >= expire_time_s


def release_wal(manifest: Manifest, holder: str) -> Manifest:
    """Return the manifest without the lease of this holder on WAL objects, if it is there."""
    kept = tuple(
        each for each in manifest.leases if each.wal_id_min is None or each.holder != holder
    )
    return replace(manifest, leases=kept)


def _wal_lease_id(holder: str) -> bytes:
    """Return the one lease id of a holder, so that two concurrent edits make one lease."""
    return new_lease_id(_NO_TIME, hashlib.sha256(holder.encode()).digest()[:RANDOM_BYTES])


def _tail(random_bytes: bytes) -> bytes:
    tail = random_bytes[:_TAIL_BYTES]
    return bytes((tail[0] & 0x3F | _VARIANT,)) + tail[1:]


@dataclass(frozen=True, slots=True)
class ElectionLease:
    """The lease of the elected writer. It is renewed by a later one with the same nonce."""

    holder: str  # HOST:PORT at which clients reach the holder
    nonce: bytes  # drawn for each term
    ttl_ms: int
    is_released: bool = False  # it may be taken over at once


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """The newest lease that a candidate has seen, and when it saw it first, by its own clock.

    `seen_ms` is a time of the monotonic clock of the candidate.
    """

    lease_id: int
    lease: ElectionLease
    seen_ms: float

    def is_over(self, now_ms: float) -> bool:
        """Return whether the lease was released, or its holder has had a whole TTL to renew it."""
        return self.lease.is_released or self.left_ms(now_ms) <= 0

    def left_ms(self, now_ms: float) -> float:
        """Return the time that the holder still has to renew it."""
        return self.seen_ms + self.lease.ttl_ms - now_ms


def observe(
    before: ObservedLease | None, lease_id: int, lease: ElectionLease, now_ms: float
) -> ObservedLease:
    """Return the observation of a candidate that sees this lease as the newest at `now_ms`."""
    if before is not None and before.lease_id == lease_id:
        return before
    return ObservedLease(lease_id, lease, now_ms)


def lapse_at_ms(renewed_ms: float, ttl_ms: int) -> float:
    """Return when the holder loses a lease whose last renewal was sent at `renewed_ms`."""
    return renewed_ms + HOLD_SHARE * ttl_ms


def renew_wait_ms(ttl_ms: int) -> float:
    """Return the time that a holder waits before the next renewal."""
    return ttl_ms / RENEWALS


def poll_wait_ms(ttl_ms: int, chance: float) -> float:
    """Return the time between two polls of a candidate; `chance` is a random number of 0 to 1."""
    return ttl_ms / POLLS * (0.5 + 0.5 * chance)


def next_poll_wait_ms(
    seen: ObservedLease | None, ttl_ms: int, chance: float, now_ms: float
) -> float:
    """Return the time until the next poll of a candidate: at most until the lease `seen` ends."""
    wait_ms = poll_wait_ms(ttl_ms, chance)
    left_ms = 0.0 if seen is None else seen.left_ms(now_ms)
    return min(wait_ms, left_ms + OVER_MS) if left_ms > 0 else wait_ms


def is_outdated(lease_id: int, current_id: int) -> bool:
    """Return whether the lease `lease_id` may be deleted while `current_id` is the current one."""
    return lease_id < current_id - KEPT
