"""The edit before deletions: what it drops, what it raises, and when it is needed."""

from __future__ import annotations

from dataclasses import replace

from shalekv.core.collectable import Folder, Listed
from shalekv.core.expiry import expire, has_expired, is_edit_needed
from shalekv.core.manifest import Lease, Manifest, Snapshot
from shalekv.core.snapshot import NEVER

NOW_S = 1_000
EMPTY = Manifest(database_id=bytes(16), manifest_id=3, write_id=bytes(16), gc_cutoff_ms=500)
FULL = replace(
    EMPTY,
    snapshots=tuple(Snapshot(bytes([t % 251]) * 16, 1, t) for t in (NEVER, 999, 1_000, 1_001)),
    leases=tuple(Lease(bytes([t % 251]) * 16, t, "job") for t in (NEVER, 999, 1_000, 1_001)),
)
SST = Listed(Folder.LEVELS, "levels/x", 1, 500, sst_id=bytes(16))


def test_what_has_expired_is_dropped() -> None:
    """Snapshots and leases whose time is `<` now go; 0 is never."""
    expired = expire(FULL, NOW_S, 0)
    assert [s.snapshot_expire_time_s for s in expired.snapshots] == [NEVER, 1_000, 1_001]
    assert [lease.expire_time_s for lease in expired.leases] == [NEVER, 1_000, 1_001]
    assert expire(FULL, NOW_S + 0.001, 0).leases == (FULL.leases[0], FULL.leases[3])


def test_cutoff_is_raised_and_never_lowered() -> None:
    """The later one of both stays."""
    assert expire(EMPTY, NOW_S, 501).gc_cutoff_ms == 501
    assert expire(EMPTY, NOW_S, 499).gc_cutoff_ms == 500


def test_edit_is_found_in_what_follows_it() -> None:
    """A manifest contains the edit if nothing expired is in it and its cutoff is high enough."""
    edited = expire(FULL, NOW_S, 600)
    assert has_expired(edited, NOW_S, 600)
    assert has_expired(replace(edited, gc_cutoff_ms=700, manifest_id=9), NOW_S, 600)
    assert not has_expired(replace(edited, gc_cutoff_ms=599), NOW_S, 600)
    assert not has_expired(replace(edited, snapshots=FULL.snapshots), NOW_S, 600)
    assert not has_expired(replace(edited, leases=FULL.leases), NOW_S, 600)


def test_edit_is_needed_for_what_has_expired() -> None:
    """Even when nothing is deleted: what was promised for a time is not kept for ever."""
    for part in ({"snapshots": FULL.snapshots}, {"leases": FULL.leases}):
        current = replace(EMPTY, **part)
        assert is_edit_needed(current, expire(current, NOW_S, 0), [])
    assert not is_edit_needed(EMPTY, expire(EMPTY, NOW_S, 600), [])


def test_edit_is_needed_for_ssts_that_the_cutoff_does_not_cover() -> None:
    """An SST that is older, `<`, than the published cutoff can go without another edit."""
    raised = expire(EMPTY, NOW_S, 600)
    for listed in (SST, replace(SST, folder=Folder.WAL, number=3, sst_id=None)):
        assert is_edit_needed(EMPTY, raised, [listed])
        assert not is_edit_needed(EMPTY, raised, [replace(listed, modified_ms=499)])
