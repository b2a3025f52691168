"""Tests of retention: the rules by which objects are kept or deleted, and their boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shalekv.protocol.lease import new_lease_id
from shalekv.protocol.manifest import Lease, Manifest, PendingLoad, Snapshot
from shalekv.protocol.retention import (
    Cutoffs,
    Folder,
    Listed,
    LiveObjects,
    Reason,
    Retention,
    first_kept_wal_id,
)
from tests.kit.retention import (
    CUTOFF_MS,
    CUTOFFS,
    FOREIGN_MS,
    OLD_MS,
    manifest_object,
    manifest_of,
    sst,
    table,
    wal_object,
)


def snapshot_of(manifest_id: int, name: str = "nightly") -> Snapshot:
    return Snapshot(bytes([manifest_id]) * 16, manifest_id, 0, name)


def judge(
    listed: Listed,
    current: Manifest,
    *older: Manifest,
    cutoffs: Cutoffs = CUTOFFS,
    fences: Sequence[str] = (),
) -> tuple[Reason, str]:
    pins = [LiveObjects.of(each) for each in (current, *older)]
    verdict = Retention(current, pins, cutoffs, fences=fences).judge(listed)
    return verdict.reason, verdict.detail


CURRENT = manifest_of(9, 5, 1, 2)
PINNING = replace(CURRENT, snapshots=(snapshot_of(4),))
OLDER = manifest_of(4, 2, 2, 3)


LEASE = Lease(new_lease_id(8, bytes(10)), 0, "compactor of here", wal_id_min=3)
LEASED = replace(CURRENT, leases=(LEASE,))
LOADS = (PendingLoad("load-7", table(7)),)
LOADING = replace(CURRENT, pending_loads=LOADS)
UNRAISED = replace(CURRENT, gc_cutoff_ms=0)
OLDER_LOADING = replace(OLDER, pending_loads=LOADS)
NIGHTLY = "nightly of manifest 4"

# The judging manifest, the older active ones, the object; the expected reason and detail.
RULES: dict[str, list[tuple[Manifest, list[Manifest], Listed, Reason, str | None]]] = {
    "the current manifest and newer ones stay": [
        (CURRENT, [], manifest_object(9, 0), Reason.CURRENT, None),
        (CURRENT, [], manifest_object(10, 0), Reason.CURRENT, None),
        (CURRENT, [], manifest_object(8, 0), Reason.INACTIVE, None),
    ],
    "a manifest that a snapshot names stays": [
        (PINNING, [OLDER], manifest_object(4), Reason.SNAPSHOT, NIGHTLY),
        (PINNING, [OLDER], manifest_object(3), Reason.INACTIVE, None),
        (PINNING, [OLDER], manifest_object(5), Reason.INACTIVE, None),
    ],
    "an inactive manifest goes when it is older than the cutoff, whatever was published": [
        (CURRENT, [], manifest_object(8, CUTOFF_MS), Reason.YOUNG, None),
        (CURRENT, [], manifest_object(8, CUTOFF_MS - 1), Reason.INACTIVE, None),
        (UNRAISED, [], manifest_object(8, CUTOFF_MS - 1), Reason.INACTIVE, None),
    ],
    "WAL objects below c go; readers take the writer's epoch from c itself": [
        (CURRENT, [], wal_object(6, 0), Reason.NOT_BELOW_C, "merged up to WAL 5"),
        (CURRENT, [], wal_object(5, 0), Reason.LAST_MERGED, None),
        (CURRENT, [], wal_object(4, 0), Reason.BELOW_C, None),
        (CURRENT, [], wal_object(4, CUTOFF_MS), Reason.YOUNG, None),
        (CURRENT, [], wal_object(4, CUTOFF_MS - 1), Reason.BELOW_C, None),
    ],
    "a snapshot keeps the WAL from its own c on": [
        (
            *(PINNING, [OLDER], wal_object(2), Reason.NOT_BELOW_C),
            f"merged up to WAL 2 in snapshot {NIGHTLY}",
        ),
        (PINNING, [OLDER], wal_object(1), Reason.BELOW_C, None),
        (PINNING, [OLDER], wal_object(6), Reason.NOT_BELOW_C, "merged up to WAL 5"),
    ],
    "a lease keeps the WAL that it reads": [
        (LEASED, [], wal_object(3), Reason.LEASE, "compactor of here"),
        (LEASED, [], wal_object(2), Reason.BELOW_C, None),
    ],
    "SSTs of active manifests stay; the current one is told first": [
        (PINNING, [OLDER], sst(1), Reason.CURRENT, "manifest 9"),
        (PINNING, [OLDER], sst(2), Reason.CURRENT, "manifest 9"),
        (PINNING, [OLDER], sst(3), Reason.SNAPSHOT, NIGHTLY),
        (PINNING, [OLDER], sst(4), Reason.UNREACHABLE, None),
        (CURRENT, [], sst(3), Reason.UNREACHABLE, None),
    ],
    "files of pending loads stay, also of one that a snapshot names": [
        (LOADING, [], sst(7), Reason.PENDING_LOAD, "load-7"),
        (LOADING, [], sst(8), Reason.UNREACHABLE, None),
        (PINNING, [OLDER_LOADING], sst(7), Reason.SNAPSHOT, NIGHTLY),
    ],
    "what was written under a lease that is there stays; else it goes by the cutoff": [
        (LEASED, [], sst(8), Reason.LEASE, "compactor of here"),
        (LEASED, [], sst(7), Reason.UNREACHABLE, None),
        (CURRENT, [], sst(8, CUTOFF_MS), Reason.YOUNG, None),
        (CURRENT, [], sst(8, CUTOFF_MS - 1), Reason.UNREACHABLE, None),
    ],
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    """Each object gets the reason and the detail of its rule."""
    for current, older, listed, reason, detail in RULES[rule]:
        found = judge(listed, current, *older)
        assert found[0] is reason, listed
        assert detail is None or found[1] == detail


def test_labels_and_first_kept_slot() -> None:
    """A snapshot without a name is named by its id; the first kept WAL object is the least c."""
    unnamed = replace(PINNING, snapshots=(snapshot_of(4, ""),))
    assert judge(manifest_object(4), unnamed, OLDER)[1] == f"{'04' * 16} of manifest 4"
    assert first_kept_wal_id(PINNING, [LiveObjects.of(PINNING), LiveObjects.of(OLDER)]) == 2


@pytest.mark.parametrize("is_current", [True, False])
def test_no_wal_goes_while_an_active_manifest_has_no_c(*, is_current: bool) -> None:
    """While an active manifest has nothing compacted, all WAL objects are kept."""
    current = manifest_of(9, None if is_current else 5, snapshots=(snapshot_of(4),))
    older = manifest_of(4, 2 if is_current else None)
    for wal_id in (0, 1, 4, 9):
        assert judge(wal_object(wal_id, 0), current, older)[0] is Reason.NOT_BELOW_C


@pytest.mark.parametrize("listed", [sst(8), wal_object(4)])
def test_ssts_younger_than_the_published_cutoff_stay(listed: Listed) -> None:
    """Objects at or above the published cutoff are kept: they may still be published (F3)."""
    unraised = replace(CURRENT, gc_cutoff_ms=OLD_MS)
    assert judge(listed, unraised)[0] is Reason.YOUNG
    raised = replace(CURRENT, gc_cutoff_ms=OLD_MS + 1)
    assert judge(listed, raised)[0] in (Reason.UNREACHABLE, Reason.BELOW_C)


@pytest.mark.parametrize("folder", Folder)
def test_what_is_not_ours_goes_at_an_age_of_its_own(folder: Folder) -> None:
    """Foreign objects may be deleted once they are older than their own cutoff."""
    foreign = Listed(folder, f"{folder.value}/notes.txt", 1, FOREIGN_MS)
    assert judge(foreign, CURRENT)[0] is Reason.YOUNG_FOREIGN
    assert judge(replace(foreign, modified_ms=FOREIGN_MS - 1), CURRENT)[0] is Reason.OLD_FOREIGN


def test_ages_become_cutoffs() -> None:
    """Each age counts back from now, and `collect_age_s` is the least age of all objects."""
    ages = {"collect_age_s": 10, "foreign_file_age_s": 30}
    assert Cutoffs.at(100_000, **ages) == Cutoffs(90_000, 70_000)
    assert Cutoffs.at(100_000, **ages | {"foreign_file_age_s": 3}) == Cutoffs(90_000, 90_000)
    assert Cutoffs.at(5, **ages).cutoff_ms == 0


def test_nothing_is_judged_unless_all_active_manifests_are_known() -> None:
    """Nothing is judged without the pins of all active manifests."""
    with pytest.raises(ValueError, match=r"\[4\] are active"):
        judge(sst(1), PINNING)
