"""What snapshots keep beyond the current manifest, together and alone."""

from __future__ import annotations

from dataclasses import replace

from shalekv.core.manifest import Manifest, PendingLoad, Snapshot
from shalekv.core.pins import Holdings, pinned_by_snapshots
from shalekv.core.sst_table import SstInfo, SstTable
from tests.kit.manifests import some_info

NOW_S = 1_000


def table(*numbers: int) -> SstTable:
    """SSTs of 10, 100, 1000 bytes and so on, by number."""
    infos: list[SstInfo] = [replace(some_info(each), size_bytes=10**each) for each in numbers]
    return SstTable.from_infos(infos)


def snapshot(name: str, manifest_id: int, expire_time_s: int = 0) -> Snapshot:
    """A snapshot of a manifest."""
    return Snapshot(name.encode().rjust(16), manifest_id, expire_time_s, name)


def manifest(manifest_id: int, *numbers: int, c: int | None = None, **fields: object) -> Manifest:
    """A manifest that names these SSTs."""
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
    """Bytes by the name of the snapshot."""
    holdings = {each.manifest_id: Holdings.of(each) for each in known}
    found = pinned_by_snapshots(current, holdings, now_s=NOW_S, wal_bytes=wal_bytes)
    return {each.snapshot.name: (each.size_bytes, each.alone_bytes) for each in found}


def test_shared_and_own_objects() -> None:
    """What two snapshots keep counts for both, and for neither alone."""
    current = manifest(9, 1, snapshots=(snapshot("a", 5), snapshot("b", 6)))
    found = pins(current, manifest(5, 1, 2, 3), manifest(6, 1, 3, 4))
    assert found == {"a": (1_100, 100), "b": (11_000, 10_000)}


def test_expired_unknown_and_current() -> None:
    """Expired snapshots are left out, unknown manifests are told as such, the current pins none."""
    snapshots = (
        snapshot("gone", 4, NOW_S - 1),
        snapshot("unknown", 5),
        snapshot("now", 9, NOW_S + 1),
    )
    assert pins(manifest(9, 1, snapshots=snapshots)) == {"unknown": (None, None), "now": (0, 0)}


def test_the_wal_and_pending_loads_are_kept_too() -> None:
    """A manifest keeps the WAL from c on, c included, and the files of loads."""
    load = PendingLoad("load", table(2))
    older = manifest(5, c=3, pending_loads=(load,))
    current = manifest(9, 1, c=6, snapshots=(snapshot("a", 5),))
    wal_bytes = dict.fromkeys(range(9), 7)
    assert pins(current, older, wal_bytes=wal_bytes) == {"a": (100 + 3 * 7, 100 + 3 * 7)}
    assert pins(current, older) == {"a": (100, 100)}
