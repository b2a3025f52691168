"""Leases: they protect what a job writes before a manifest names it (rule F3).

A job registers a lease, writes its objects under ids that derive from the lease, and publishes
them by an edit which requires that the lease is still there. The collector removes leases that
have expired by the store's clock, and only then deletes what no manifest names. So whichever
comes first, no published object is deleted; and no clock but the store's matters.

The ids are UUIDs of version 7. All objects of one lease share its first 8 bytes: the time at which
the lease was made, and 12 random bits; the other 62 random bits are their own.
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


# --- wal_lease
# Leases that keep WAL objects, one for each holder: consumers, and the retention. Pure.
#
# A collector that has judged by an older manifest deletes whenever it gets to it (rule F3). So a
# lease may only claim what no manifest before it has given up: the slots from c on, and those
# that another lease in the same manifest keeps, which was made by this rule itself. Once it is in
# a manifest, whatever it claims stays until an edit moves it on or removes it. What has expired
# and is still there counts, too: a collector deletes nothing before an edit of its own has
# removed it.


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


# --- leasing
# The lease of whoever tries to be the writer: when it may be taken, and when it is lost.
#
# Of two moments only ever one process's own clock is asked, never the clocks of two:
#
#     holder       sends a renewal ------- gives up, HOLD_SHARE of the TTL later
#     candidate           sees that renewal ------------- may take over, one whole TTL later
#
# A candidate sees a renewal after it was sent. So the holder gives up before anybody takes over,
# as long as no clock runs faster than another by more than what `HOLD_SHARE` leaves. Nothing but
# availability rests on it: two that both hold a lease are kept apart by their epochs (I2).


HOLD_SHARE = 0.9  # of the TTL: after that, a holder that could not renew has lost its lease
RENEWALS = 3  # are tried within a TTL
POLLS = 10  # of a candidate within a TTL, at least

OVER_MS = 1  # after its end a lease is over, however a clock is rounded

KEPT = 8  # leases before the current one, for those who look at them now


@dataclass(frozen=True, slots=True)
class ElectionLease:
    """What a lease says. Who holds one renews it by another one, of the same nonce."""

    holder: str  # HOST:PORT under which clients reach it
    nonce: bytes  # drawn for each tenure
    ttl_ms: int
    is_released: bool = False  # it may be taken at once


@dataclass(frozen=True, slots=True)
class Sighting:
    """The newest lease that a candidate has seen, and when it saw it first, by its own clock."""

    lease_id: int
    lease: ElectionLease
    seen_ms: float

    def is_over(self, now_ms: float) -> bool:
        """Whether its holder has had a whole TTL to renew it."""
        return self.lease.is_released or self.left_ms(now_ms) <= 0

    def left_ms(self, now_ms: float) -> float:
        """How long its holder still has to renew it."""
        return self.seen_ms + self.lease.ttl_ms - now_ms


def sight(before: Sighting | None, lease_id: int, lease: ElectionLease, now_ms: float) -> Sighting:
    """What a candidate knows that now sees this lease as the newest one."""
    if before is not None and before.lease_id == lease_id:
        return before
    return Sighting(lease_id, lease, now_ms)


def lapses_ms(renewed_ms: float, ttl_ms: int) -> float:
    """When a lease is lost whose last renewal was sent at `renewed_ms`."""
    return renewed_ms + HOLD_SHARE * ttl_ms


def renew_wait_ms(ttl_ms: int) -> float:
    """How long a holder waits before the next renewal."""
    return ttl_ms / RENEWALS


def poll_wait_ms(ttl_ms: int, chance: float) -> float:
    """How long a candidate waits before it looks again; `chance` is a random number of 0 to 1."""
    return ttl_ms / POLLS * (0.5 + 0.5 * chance)


def look_wait_ms(seen: Sighting | None, ttl_ms: int, chance: float, now_ms: float) -> float:
    """How long a candidate waits that has seen this lease: not beyond the end of the lease."""
    wait_ms = poll_wait_ms(ttl_ms, chance)
    left_ms = 0.0 if seen is None else seen.left_ms(now_ms)
    return min(wait_ms, left_ms + OVER_MS) if left_ms > 0 else wait_ms


def is_outdated(lease_id: int, current_id: int) -> bool:
    """Whether this lease may be deleted while that one is the current one."""
    return lease_id < current_id - KEPT
