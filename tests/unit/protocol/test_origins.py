"""Tests of origins: the SSTs of other databases that a manifest names, and the pins for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.errors import SnapshotNotFound
from shalekv.protocol.compaction.jobs import MergeJob, MergeResult
from shalekv.protocol.compaction.publish import CompactorId, publish
from shalekv.protocol.lease import leased_sst_id
from shalekv.protocol.manifest import CasMode, Lease, Manifest, Origin, RecentLoad, Snapshot
from shalekv.protocol.origins import (
    FIRST_SLOT,
    Parent,
    clone_origins,
    drop_pins,
    first_manifest,
    first_write_id,
    is_pin_permanent,
    make_pin_permanent,
    needed_pins,
    unneeded_pins,
)
from shalekv.protocol.retention import LiveObjects, Retention
from shalekv.protocol.snapshot import NEVER, share_snapshot
from shalekv.protocol.sst_table import SstInfo
from tests.kit.retention import CUTOFFS, manifest_object, manifest_of, sst, sst_id, wal_object

OWN, GRAND, OLD = bytes([1]) * 16, bytes([2]) * 16, bytes([3]) * 16  # database ids
PIN, GRAND_PIN = bytes([4]) * 16, bytes([5]) * 16
LEASE = Lease(sst_id(90), 0, "job")
COMPACTOR = CompactorId(1, bytes(16))


def origin(*numbers: int, url: str = "memory://grand", database_id: bytes = GRAND) -> Origin:
    pin = GRAND_PIN if url else b""
    return Origin(database_id, url, pin, b"".join(map(sst_id, numbers)))


def manifest(*numbers: int, origins: tuple[Origin, ...] = ()) -> Manifest:
    """Return a manifest with these SSTs in its levels, and a compactor with a lease."""
    made = manifest_of(7, 3, *numbers, origins=origins, leases=(LEASE,))
    return replace(made, database_id=OWN, compactor_epoch=1)


def info(made: Manifest, number: int) -> SstInfo:
    return next(row for row in made.leveled_ssts if row.id == sst_id(number))


def test_a_merge_forgets_what_it_has_read() -> None:
    """A merged SST leaves its origin, which stays when it is empty: its pin has to be removed."""
    before = manifest(1, 2, 3, origins=(origin(1, 2), origin(3, url="", database_id=OLD)))
    output = replace(info(before, 1), id=leased_sst_id(LEASE.id, b"x" * 8), level=1)
    job = MergeJob(0, 1, [info(before, 1)], [], is_move=False, reason="")
    once = publish(before, COMPACTOR, MergeResult(job, [output]), LEASE.id)
    assert once.origins == (origin(2), origin(3, url="", database_id=OLD))
    rest = MergeJob(0, 1, [info(before, 2), info(before, 3)], [], is_move=False, reason="")
    both = publish(once, COMPACTOR, MergeResult(rest, []), LEASE.id)
    assert both.origins == (origin(),)
    assert needed_pins(both) == {}
    assert unneeded_pins(both, ()) == {GRAND_PIN: "memory://grand"}
    assert drop_pins(both, {GRAND_PIN}).origins == ()


def test_a_clone_finds_every_sst() -> None:
    """Own, restored and foreign SSTs of the parent get an origin, those of the clone none."""
    made = manifest(1, 2, 3, 4, origins=(origin(2), origin(3, url="", database_id=OLD)))
    parent = Parent(made, "memory://parent", PIN, {GRAND_PIN: b"a pin of its own"})
    ids = b"".join(map(sst_id, (1, 2, 3, 9)))
    assert set(clone_origins(parent, {sst_id(9)}, ids)) == {
        Origin(OWN, "memory://parent", PIN, sst_id(1)),
        Origin(GRAND, "memory://grand", b"a pin of its own", sst_id(2)),
        Origin(OLD, "memory://parent", PIN, sst_id(3)),
    }


def test_the_first_manifest_leaves_processes_behind() -> None:
    """A clone takes over numbers and loads, but no snapshots, leases, nonces and addresses."""
    shared = replace(
        manifest(1),
        writer_epoch=5,
        writer_nonce=b"n" * 16,
        writer_address="here:1",
        writer_first_seq=70,
        last_compacted_seq=80,
        logical_time_ms=90,
        snapshots=(Snapshot(PIN, 3, 0),),
        recent_loads=(RecentLoad("a", 1),),
        fence_width=4,
    )
    first = first_manifest(
        shared, database_id=OLD, write_id=PIN, cas_mode=CasMode.TWO_PHASE, origins=(origin(1),)
    )
    assert first == Manifest(
        database_id=OLD,
        manifest_id=0,
        write_id=PIN,
        cas_mode=CasMode.TWO_PHASE,
        writer_epoch=5,
        writer_first_seq=70,
        compactor_epoch=1,
        wal_id_last_compacted=FIRST_SLOT,
        wal_id_last_seen=FIRST_SLOT,
        last_compacted_seq=80,
        logical_time_ms=90,
        leveled_ssts=shared.leveled_ssts,
        recent_loads=shared.recent_loads,
        origins=(origin(1),),
    )
    assert first_write_id(OLD) != first_write_id(OWN)


def test_a_pin_is_fixed_while_it_lives() -> None:
    """A fixed pin never expires and keeps no WAL, and an expired one cannot be fixed (F3)."""
    made = replace(manifest(1), snapshots=(Snapshot(PIN, 7, 100, "clone"),))
    fixed = make_pin_permanent(made, PIN, now_s=100)
    assert fixed.snapshots == (Snapshot(PIN, 7, NEVER, "clone", ssts_only=True),)
    assert is_pin_permanent(fixed, PIN)
    assert not is_pin_permanent(made, PIN)
    shared = share_snapshot(fixed, PIN, GRAND_PIN, expire_time_s=200, now_s=100)
    assert shared.snapshots[1].ssts_only
    with pytest.raises(SnapshotNotFound):
        make_pin_permanent(made, PIN, now_s=101)
    with pytest.raises(SnapshotNotFound):
        make_pin_permanent(made, GRAND_PIN, now_s=1)


def test_a_pin_keeps_ssts_and_no_log() -> None:
    """A pin keeps its manifest and the SSTs of that, but no WAL objects."""
    older = manifest_of(4, 2, 1)
    for ssts_only in (False, True):
        pin = Snapshot(PIN, 4, NEVER, ssts_only=ssts_only)
        current = manifest_of(9, 5, 2, snapshots=(pin,))
        retention = Retention(current, [LiveObjects.of(older), LiveObjects.of(current)], CUTOFFS)
        assert retention.judge(wal_object(3)).may_delete is ssts_only
        assert not retention.judge(wal_object(5)).may_delete
        assert not retention.judge(sst(1)).may_delete
        assert not retention.judge(manifest_object(4)).may_delete


def test_what_is_elsewhere_is_not_kept_here() -> None:
    """Only SSTs in the own folder of a clone count as kept by its manifests."""
    made = manifest(1, 2, 3, origins=(origin(1), origin(2, url="")))
    sizes = LiveObjects.of(made).sizes({})
    assert {each for each, size_bytes in sizes.items() if size_bytes} == {sst_id(2), sst_id(3)}
