"""Expiry: the edit of the manifest that comes before anything is deleted (rule F3).

It drops the snapshots and leases whose time is over by the store's clock, so that whoever renews
one or publishes under it finds it gone; and it raises the cutoff, which tells edits how old a new
object of theirs must not be unless it is leased.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shalekv.core.collectable import Folder, Listed
from shalekv.core.wal_retention import retain_wal
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.protocol.snapshot import NEVER, is_expired


def is_lease_expired(lease: Lease, now_s: float) -> bool:
    """Whether the lease protects nothing any more at `now_s` of the store's clock."""
    return lease.expire_time_s != NEVER and lease.expire_time_s < now_s


def expire(
    manifest: Manifest, now_s: float, cutoff_ms: int, *, retained: int | None = None
) -> Manifest:
    """The manifest without what has expired at `now_s`, and with this cutoff or a later one.

    WAL objects from `retained` on stay, see `retain_wal`.
    """
    expired = replace(
        manifest,
        snapshots=tuple(s for s in manifest.snapshots if not is_expired(s, now_s)),
        leases=tuple(lease for lease in manifest.leases if not is_lease_expired(lease, now_s)),
        gc_cutoff_ms=max(manifest.gc_cutoff_ms, cutoff_ms),
    )
    return retain_wal(expired, retained)


def has_expired(
    manifest: Manifest, now_s: float, cutoff_ms: int, *, retained: int | None = None
) -> bool:
    """Whether the manifest contains the edit `expire` with these arguments (F2).

    Another collector's edit is as good as ours: what counts is what the manifest says.
    """
    return manifest == expire(manifest, now_s, cutoff_ms, retained=retained)


def is_edit_needed(current: Manifest, expired: Manifest, doomed: Iterable[Listed]) -> bool:
    """Whether `expired` must be published before `doomed` is deleted; they go if it is current.

    Not for SSTs that are older than the cutoff which is published already: no edit that has not
    seen it can succeed any more. And not for manifests, which no edit makes active again; each
    edit leaves one behind, and a collector must not go on for ever with what it left itself.
    """
    if (current.snapshots, current.leases) != (expired.snapshots, expired.leases):
        return True
    return any(
        listed.modified_ms >= current.gc_cutoff_ms
        for listed in doomed
        if listed.folder is not Folder.MANIFEST and not listed.is_foreign
    )
