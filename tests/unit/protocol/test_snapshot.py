"""Tests of snapshots: the manifests and bytes that they keep, and the edits that change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shalekv.errors import SnapshotExists, SnapshotNotFound
from shalekv.protocol.manifest import Manifest, PendingLoad, Snapshot
from shalekv.protocol.retention import LiveObjects, pinned_by_snapshots
from shalekv.protocol.snapshot import (
    NEVER,
    create_snapshot,
    is_expired,
    maintain_snapshots,
    renew_snapshot,
    share_snapshot,
)
from shalekv.protocol.sst_table import SstInfo, SstTable
from tests.kit.manifests import some_info

NIGHTLY = Snapshot(b"n" * 16, 3, 100, "nightly", 17)
OWN = Snapshot(b"o" * 16, 5, NEVER)
NEW_ID = b"x" * 16
MANIFEST = Manifest(
    database_id=bytes(16), manifest_id=7, write_id=bytes(16), snapshots=(NIGHTLY, OWN)
)


def maintained(
    *,
    renewed: tuple[bytes, ...] = (),
    removed: tuple[bytes, ...] = (),
    created: bytes | None = None,
) -> tuple[Snapshot, ...]:
    """Return the snapshots after the edit of a serving process, whose snapshots expire at 900."""
    edited = maintain_snapshots(
        MANIFEST, renewed=renewed, removed=removed, created=created, expire_time_s=900
    )
    assert replace(edited, snapshots=()) == replace(MANIFEST, snapshots=())
    return edited.snapshots


@pytest.mark.parametrize(("now_s", "expected"), [(99, False), (100, False), (100.1, True)])
def test_snapshot_lives_until_its_time_is_over(now_s: float, *, expected: bool) -> None:
    """A snapshot protects its manifest up to its last second, and for ever without an expiry."""
    assert is_expired(NIGHTLY, now_s) is expected
    assert not is_expired(OWN, now_s)


def test_snapshot_that_is_made_again_is_there_once() -> None:
    """An edit that is repeated after a conflict leaves one snapshot, of the later manifest."""
    lost = create_snapshot(MANIFEST, NEW_ID, expire_time_s=50, name="mine")
    again = create_snapshot(replace(lost, manifest_id=8), NEW_ID, expire_time_s=50, name="mine")
    assert again.snapshots == (NIGHTLY, OWN, Snapshot(NEW_ID, 9, 50, "mine"))


def test_names_are_given_once() -> None:
    """Two snapshots cannot have the same name, but there may be many without a name."""
    with pytest.raises(SnapshotExists, match="'nightly'"):
        create_snapshot(MANIFEST, NEW_ID, expire_time_s=50, name="nightly")
    with pytest.raises(SnapshotExists, match="'nightly'"):
        share_snapshot(MANIFEST, OWN.id, NEW_ID, expire_time_s=50, now_s=1, name="nightly")
    assert len(create_snapshot(MANIFEST, NEW_ID, expire_time_s=50).snapshots) == 3


def test_shared_snapshot_shows_the_same() -> None:
    """A shared snapshot names the manifest and the checksum of the original."""
    shared = share_snapshot(
        MANIFEST, NIGHTLY.id, NEW_ID, expire_time_s=50, now_s=100, manifest_checksum=99
    )
    assert shared.snapshots == (NIGHTLY, OWN, Snapshot(NEW_ID, 3, 50, "", 17))
    first = share_snapshot(
        MANIFEST, OWN.id, NEW_ID, expire_time_s=50, now_s=100, manifest_checksum=99
    )
    assert first.snapshots[-1] == Snapshot(NEW_ID, 5, 50, "", 99)


REFUSED: dict[str, Callable[[bytes], Manifest]] = {
    "renew": lambda id_: renew_snapshot(MANIFEST, id_, expire_time_s=900, now_s=101),
    "share": lambda id_: share_snapshot(MANIFEST, id_, NEW_ID, expire_time_s=900, now_s=101),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("snapshot_id", [NIGHTLY.id, b"?" * 16], ids=["expired", "unknown"])
def test_a_snapshot_that_is_over_is_refused(kind: str, snapshot_id: bytes) -> None:
    """An expired snapshot is treated as gone, even while it is still in the manifest."""
    with pytest.raises(SnapshotNotFound, match=f"{snapshot_id.hex()} is not in manifest 7"):
        REFUSED[kind](snapshot_id)


def test_process_removes_and_creates_in_one_edit() -> None:
    """One edit creates the snapshot of a new version and removes that of an old one."""
    created = Snapshot(NEW_ID, 8, 900)
    assert maintained(removed=(OWN.id,), created=NEW_ID) == (NIGHTLY, created)
    assert maintained(renewed=(OWN.id,), removed=(OWN.id,), created=NEW_ID) == (NIGHTLY, created)


NOW_S = 1_000


def table(*numbers: int) -> SstTable:
    """Return SSTs of 10, 100, 1000 bytes and so on, by number."""
    infos: list[SstInfo] = [replace(some_info(each), size_bytes=10**each) for each in numbers]
    return SstTable.from_infos(infos)


def snapshot(name: str, manifest_id: int, expire_time_s: int = 0) -> Snapshot:
    return Snapshot(name.encode().rjust(16), manifest_id, expire_time_s, name)


def manifest(manifest_id: int, *numbers: int, c: int | None = None, **fields: object) -> Manifest:
    made = Manifest(
        database_id=bytes(16),
        manifest_id=manifest_id,
        write_id=bytes(16),
        wal_id_last_compacted=c,
        leveled_ssts=table(*numbers),
    )
    return replace(made, **fields)  # type: ignore[arg-type] # any field


def pins(
    current: Manifest, *known: Manifest, wal_bytes: dict[int, int] | None = None
) -> dict[str, tuple[int | None, int | None]]:
    live = {each.manifest_id: LiveObjects.of(each) for each in known}
    found = pinned_by_snapshots(current, live, now_s=NOW_S, wal_bytes=wal_bytes)
    return {each.snapshot.name: (each.size_bytes, each.alone_bytes) for each in found}


def test_shared_and_own_objects() -> None:
    """Objects that two snapshots keep count for both, and in `alone_bytes` of neither."""
    current = manifest(9, 1, snapshots=(snapshot("a", 5), snapshot("b", 6)))
    found = pins(current, manifest(5, 1, 2, 3), manifest(6, 1, 3, 4))
    assert found == {"a": (1_100, 100), "b": (11_000, 10_000)}


def test_expired_unknown_and_current() -> None:
    """Expired snapshots are left out, and sizes of unknown manifests are None."""
    snapshots = (
        snapshot("gone", 4, NOW_S - 1),
        snapshot("unknown", 5),
        snapshot("now", 9, NOW_S + 1),
    )
    assert pins(manifest(9, 1, snapshots=snapshots)) == {"unknown": (None, None), "now": (0, 0)}


def test_the_wal_and_pending_loads_are_kept_too() -> None:
    """A manifest keeps the WAL from c on, c included, and the files of pending loads."""
    load = PendingLoad("load", table(2))
    older = manifest(5, c=3, pending_loads=(load,))
    current = manifest(9, 1, c=6, snapshots=(snapshot("a", 5),))
    wal_bytes = dict.fromkeys(range(9), 7)
    assert pins(current, older, wal_bytes=wal_bytes) == {"a": (100 + 3 * 7, 100 + 3 * 7)}
    assert pins(current, older) == {"a": (100, 100)}
