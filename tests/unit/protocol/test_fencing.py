"""Tests of the rules of claiming an epoch and fencing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shalekv.errors import Fenced, IllegalState
from shalekv.protocol.fencing import (
    FenceRun,
    Occupant,
    SlotVerdict,
    WriterId,
    check_owner,
    judge,
    lost_slot_error,
    run_counts,
)
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.opening import (
    claim_epoch,
    finish_opening,
    first_seq_of_writer,
    is_opening_finished,
)

OWN = WriterId(5, b"o" * 16)
RIVAL_NONCE = b"r" * 16

VERDICTS = [
    (OWN, True, SlotVerdict.OURS),
    (OWN, False, SlotVerdict.OURS),
    (WriterId(5, RIVAL_NONCE), True, SlotVerdict.DUPLICATE_EPOCH),
    (WriterId(5, RIVAL_NONCE), False, SlotVerdict.DUPLICATE_EPOCH),
    (WriterId(4, RIVAL_NONCE), True, SlotVerdict.OLDER_FENCE),
    (WriterId(4, RIVAL_NONCE), False, SlotVerdict.OLDER_DATA),
    (WriterId(4, OWN.nonce), True, SlotVerdict.OLDER_FENCE),
    (WriterId(6, RIVAL_NONCE), True, SlotVerdict.NEWER),
    (WriterId(6, RIVAL_NONCE), False, SlotVerdict.NEWER),
    (WriterId(6, OWN.nonce), False, SlotVerdict.NEWER),
]


def manifest_of(own: WriterId = OWN, **fields: object) -> Manifest:
    manifest = Manifest(
        database_id=b"d" * 16,
        manifest_id=7,
        write_id=b"w" * 16,
        writer_epoch=own.epoch,
        writer_nonce=own.nonce,
    )
    return replace(manifest, **fields)  # type: ignore[arg-type]  # the tests know the fields


def claimed(
    manifest: Manifest, *, max_parallel_writes: int = 1, nonce: bytes = b"n" * 16
) -> Manifest:
    return claim_epoch(
        manifest,
        nonce=nonce,
        max_parallel_writes=max_parallel_writes,
        address="localhost:1",
        snapshot_expire_time_s=1_000,
    )


@pytest.mark.parametrize(("owner", "is_fence", "verdict"), VERDICTS)
def test_verdict(owner: WriterId, is_fence: bool, verdict: SlotVerdict) -> None:  # noqa: FBT001 - a row of the table
    """A slot is judged by the epoch of its owner, then by the nonce, then by what it holds."""
    assert judge(Occupant(owner, is_fence), OWN) is verdict


def test_newer_writer_ends_the_run() -> None:
    """A fence attempt that meets a newer writer's slot raises `Fenced`, which names its epoch."""
    with pytest.raises(Fenced, match="slot 12 belongs to epoch 9") as caught:
        FenceRun(first=12, width=1).after(SlotVerdict.NEWER, 9, OWN)
    assert (caught.value.own_epoch, caught.value.newer_epoch) == (5, 9)


@pytest.mark.parametrize(
    ("owner", "error", "message"),
    [
        (WriterId(6, RIVAL_NONCE), Fenced, "slot 12 belongs to epoch 6"),
        (WriterId(4, RIVAL_NONCE), IllegalState, "slot 12 holds data of the older epoch 4"),
        (WriterId(5, RIVAL_NONCE), IllegalState, "slot 12 .* same epoch 5"),
        (OWN, IllegalState, "slot 12 .* same epoch 5"),
    ],
)
def test_lost_slot_is_explained(owner: WriterId, error: type[Exception], message: str) -> None:
    """The error for a slot lost to another object depends on the epoch of the owner."""
    found = lost_slot_error(Occupant(owner, is_fence=False), OWN, "WAL slot 12")
    assert type(found) is error
    assert re.search(message, str(found))


def test_owner_is_epoch_and_nonce() -> None:
    """A manifest is ours by epoch and nonce; another nonce or a newer epoch means fenced."""
    check_owner(manifest_of(OWN), OWN)
    for other in (WriterId(5, RIVAL_NONCE), WriterId(6, RIVAL_NONCE), WriterId(6, OWN.nonce)):
        with pytest.raises(Fenced) as caught:
            check_owner(manifest_of(other), OWN)
        assert caught.value.newer_epoch == other.epoch


def test_epoch_below_ours_is_illegal() -> None:
    """A manifest whose writer epoch has gone down raises `IllegalState` (I5)."""
    with pytest.raises(IllegalState, match="epochs never go down"):
        check_owner(manifest_of(WriterId(4, RIVAL_NONCE)), OWN)


def test_claim_takes_the_next_epoch_and_keeps_the_wal() -> None:
    """A claim raises the epoch by one and adds a snapshot of the manifest that it becomes."""
    other = Snapshot(id=b"s" * 16, manifest_id=3, snapshot_expire_time_s=9)
    after = claimed(manifest_of(snapshots=(other,)))
    assert (after.writer_epoch, after.writer_nonce) == (6, b"n" * 16)
    assert after.writer_address == "localhost:1"
    own = Snapshot(id=b"n" * 16, manifest_id=8, snapshot_expire_time_s=1_000)
    assert after.snapshots == (other, own)


def test_first_writer_begins_with_the_first_number() -> None:
    """Before any writer has served, numbers begin right after the last durable one."""
    assert first_seq_of_writer(manifest_of(), 0) == 1
    assert first_seq_of_writer(manifest_of(), 17) == 18


SNAPSHOT_ID = b"s" * 16


def finished(manifest: Manifest, own: WriterId) -> Manifest:
    """The manifest after the last edit of an opening."""
    return finish_opening(
        manifest,
        own,
        last_wal_id=9,
        first_seq=77,
        snapshot_id=SNAPSHOT_ID,
        snapshot_expire_time_s=900,
    )


def is_finished(manifest: Manifest, own: WriterId) -> bool:
    return is_opening_finished(manifest, own, snapshot_id=SNAPSHOT_ID)


def test_finished_opening_fences_for_our_own_uploads_only() -> None:
    """The last edit narrows the fence width to our window and leaves the snapshot of the levels."""
    before = claimed(manifest_of(fence_width=4, wal_id_last_seen=3), max_parallel_writes=2)
    own = WriterId(6, b"n" * 16)
    after = finished(before, own)
    assert (after.fence_width, after.writer_first_seq, after.wal_id_last_seen) == (2, 77, 9)
    assert after.snapshots == (Snapshot(SNAPSHOT_ID, before.manifest_id + 1, 900),)
    assert finished(replace(before, wal_id_last_seen=12), own).wal_id_last_seen == 12


def test_finished_opening_is_recognised() -> None:
    """An opening counts as finished in exactly the manifests that contain its last edit (F2)."""
    own = WriterId(6, b"n" * 16)
    before = claimed(manifest_of(fence_width=4))
    after = finished(before, own)
    assert is_finished(after, own)
    assert is_finished(replace(after, compactor_epoch=3), own)
    assert not is_finished(before, own)
    assert not is_finished(replace(after, fence_width=4), own)
    assert not is_finished(replace(after, snapshots=before.snapshots), own)
    assert not is_finished(claimed(after, nonce=RIVAL_NONCE), own)


def test_run_counts_above_what_is_compacted() -> None:
    """A complete run counts if the manifest, read after it, has c below its first slot."""
    run = FenceRun(first=10, width=2, length=2)
    assert run_counts(run, manifest_of(wal_id_last_compacted=None), OWN)
    assert run_counts(run, manifest_of(wal_id_last_compacted=9), OWN)
    assert not run_counts(run, manifest_of(wal_id_last_compacted=10), OWN)
    assert not run_counts(replace(run, length=1), manifest_of(), OWN)


def test_a_proven_fence_counts_below_what_is_compacted() -> None:
    """A fence that was once above c is never collected: it counts even after c has passed it."""
    begun = FenceRun(first=10, width=2, length=1)
    proven = begun.proven_by(manifest_of(wal_id_last_compacted=9))
    run = proven.after(SlotVerdict.OURS, OWN.epoch, OWN)
    assert not run_counts(proven, manifest_of(wal_id_last_compacted=10), OWN)
    assert run_counts(run, manifest_of(wal_id_last_compacted=10), OWN)
    assert not run_counts(run, manifest_of(wal_id_last_compacted=11), OWN)
    all_proven = run.proven_by(manifest_of(wal_id_last_compacted=10))
    assert run_counts(all_proven, manifest_of(wal_id_last_compacted=99), OWN)
    assert all_proven.proven_by(manifest_of(wal_id_last_compacted=99)) == all_proven


@pytest.mark.parametrize("c", [10, 11, 99])
def test_a_run_that_is_not_proven_begins_anew(c: int) -> None:
    """A fence that is first seen at or below c does not count: its slot may have been collected.

    The next run begins behind c, however far ahead that is by then.
    """
    begun = FenceRun(first=10, width=2, length=1)
    found = begun.proven_by(manifest_of(wal_id_last_compacted=c))
    assert found == FenceRun(first=c + 1, width=2)


def test_run_of_a_fenced_writer_does_not_count() -> None:
    """A run does not count once the manifest shows another owner."""
    run = FenceRun(first=10, width=1, length=1)
    with pytest.raises(Fenced):
        run_counts(run, manifest_of(WriterId(6, RIVAL_NONCE)), OWN)
