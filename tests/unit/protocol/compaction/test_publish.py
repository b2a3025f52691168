"""Tests of the rules by which a compactor edits the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shalekv.errors import IllegalState, LeaseLost, Superseded
from shalekv.protocol.compaction.jobs import MergeJob, MergeResult, WalJob, WalResult, move_result
from shalekv.protocol.compaction.publish import (
    CompactorId,
    check_compactor,
    is_published,
    publish,
)
from shalekv.protocol.lease import RANDOM_BYTES, leased_sst_id, new_lease_id, with_lease
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import SYSTEM_LEVEL, Lease, Manifest, PendingLoad, Snapshot
from shalekv.protocol.sst_table import SstInfo, SstTable

NONCE, OTHER_NONCE = b"n" * 16, b"o" * 16
OWN = CompactorId(3, NONCE)
LEASE_ID = new_lease_id(5, bytes(RANDOM_BYTES))
OTHER_LEASE_ID = new_lease_id(6, bytes(RANDOM_BYTES))


def info(number: int, level: int = 0, *, lease_id: bytes = LEASE_ID) -> SstInfo:
    sst_id = leased_sst_id(lease_id, number.to_bytes(8, "big"))
    first, last = b"%03d" % (2 * number), b"%03d" % (2 * number + 1)
    return SstInfo(sst_id, level, first, last, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)


OLD = [info(number, number // 3, lease_id=OTHER_LEASE_ID) for number in range(4)]
MANIFEST = with_lease(
    Manifest(
        database_id=bytes(16),
        manifest_id=8,
        write_id=bytes(16),
        compactor_epoch=3,
        compactor_nonce=NONCE,
        wal_id_last_compacted=6,
        wal_id_last_seen=9,
        last_compacted_seq=60,
        logical_time_ms=1_000,
        leveled_ssts=SstTable.from_infos(OLD),
        snapshots=(Snapshot(b"s" * 16, 4, 0, "named"),),
    ),
    Lease(LEASE_ID, 99, "us"),
)


def of_slots(
    slots: range, outputs: Sequence[SstInfo] = (), last_seq: int = 70, time_ms: int = 1_500
) -> WalResult:
    return WalResult(WalJob(slots, ""), outputs, last_seq, time_ms)


def of_merge(outputs: Sequence[SstInfo]) -> MergeResult:
    """Return the result of merging the first two SSTs of L0 and the one of L1."""
    return MergeResult(MergeJob(0, 1, OLD[:2], OLD[3:], is_move=False, reason=""), outputs)


MOVE = MergeJob(0, 1, OLD[:2], (), is_move=True, reason="")
MERGES: list[MergeResult] = [of_merge([info(12, 1)]), of_merge([]), move_result(MOVE)]


def test_the_first_slot_is_zero() -> None:
    """A database without levels begins with slot 0, and with no other."""
    new = replace(MANIFEST, wal_id_last_compacted=None, wal_id_last_seen=None)
    after = publish(new, OWN, of_slots(range(1)), LEASE_ID)
    assert (after.wal_id_last_compacted, after.wal_id_last_seen) == (0, 0)
    with pytest.raises(IllegalState):
        publish(new, OWN, of_slots(range(1, 2)), LEASE_ID)


@pytest.mark.parametrize("slots", [range(6, 8), range(8, 9), range(7, 7)])
def test_slots_follow_those_that_are_compacted(slots: range) -> None:
    """A result that omits a slot, repeats one, or has none, is not published."""
    with pytest.raises(IllegalState, match="do not follow"):
        publish(MANIFEST, OWN, of_slots(slots), LEASE_ID)


@pytest.mark.parametrize("result", MERGES)
def test_an_input_that_is_gone_was_merged_by_another(result: MergeResult) -> None:
    """A merge whose input is not in its level any more is not published: it would undo others."""
    gone = replace(MANIFEST, leveled_ssts=MANIFEST.leveled_ssts.replace([OLD[1].id], ()))
    moved = [replace(OLD[1], level=2)]
    elsewhere = replace(MANIFEST, leveled_ssts=MANIFEST.leveled_ssts.replace([OLD[1].id], moved))
    for manifest in (gone, elsewhere):
        with pytest.raises(IllegalState, match="is not in level 0"):
            publish(manifest, OWN, result, LEASE_ID)


RESULTS: list[WalResult | MergeResult] = [
    of_slots(range(7, 9), [info(10), info(11, SYSTEM_LEVEL)]),
    of_slots(range(7, 8), last_seq=0),
    *MERGES,
]


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize(("epoch", "nonce"), [(4, OTHER_NONCE), (4, NONCE), (3, OTHER_NONCE)])
def test_only_the_compactor_publishes(
    result: WalResult | MergeResult, epoch: int, nonce: bytes
) -> None:
    """A compactor publishes nothing once the manifest has another epoch or nonce (I9)."""
    manifest = replace(MANIFEST, compactor_epoch=epoch, compactor_nonce=nonce)
    with pytest.raises(Superseded) as caught:
        publish(manifest, OWN, result, LEASE_ID)
    assert (caught.value.own_epoch, caught.value.newer_epoch) == (3, epoch)


def test_an_epoch_never_goes_down() -> None:
    """An older compactor epoch in the manifest is an illegal state."""
    with pytest.raises(IllegalState, match="never go down"):
        check_compactor(replace(MANIFEST, compactor_epoch=2), OWN)


def test_a_lease_protects_what_was_written_under_it() -> None:
    """An output that was not written under the lease is not published: it may be deleted."""
    stranger = of_merge([info(12, 1, lease_id=OTHER_LEASE_ID)])
    with pytest.raises(LeaseLost, match="was not written under"):
        publish(MANIFEST, OWN, stranger, LEASE_ID)


def test_a_result_of_nothing_is_not_taken_for_anothers() -> None:
    """A result without outputs counts as published only if all its inputs are gone by our edit."""
    without = replace(MANIFEST, leveled_ssts=MANIFEST.leveled_ssts.replace([OLD[0].id], ()))
    assert not is_published(without, OWN, of_merge([]))
    theirs = replace(
        MANIFEST,
        compactor_epoch=4,
        compactor_nonce=OTHER_NONCE,
        leveled_ssts=MANIFEST.leveled_ssts.replace([each.id for each in OLD[:2]], ()),
    )
    assert not is_published(theirs, OWN, of_merge([]))
    assert not is_published(theirs, OWN, of_merge([info(12, 1)]))


def test_a_load_moves_into_l0_when_its_record_is_compacted() -> None:
    """Compacting a load's record numbers its files, and the load is remembered, not pending."""
    file = replace(info(20, lease_id=OTHER_LEASE_ID), min_seq=0, max_seq=0)
    pending = PendingLoad("load", SstTable.from_infos([file]))
    load = CommittedLoad("load", pending.ssts, 65, 7)
    result = replace(of_slots(range(7, 8), last_seq=65), loads=[load])
    manifest = replace(MANIFEST, pending_loads=(pending,))
    assert not is_published(manifest, OWN, result)
    after = publish(manifest, OWN, result, LEASE_ID)
    assert [*after.leveled_ssts] == [*OLD, replace(file, min_seq=65, max_seq=65)]
    assert after.pending_loads == ()
    assert [each.load_id for each in after.recent_loads] == ["load"]
    assert is_published(after, OWN, result)
    with pytest.raises(IllegalState, match="not pending"):
        publish(MANIFEST, OWN, result, LEASE_ID)
