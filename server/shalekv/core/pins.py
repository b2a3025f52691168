"""What each snapshot keeps from being deleted."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from shalekv.core.manifest import Manifest, Snapshot
from shalekv.core.snapshot import is_expired
from shalekv.core.sst_table import ID_BYTES

Sizes = dict[bytes | int, int]  # object -> bytes: SSTs by their ids, WAL objects by theirs


@dataclass(frozen=True, slots=True)
class Pinned:
    """A snapshot, and the bytes that the current manifest does not keep, but this snapshot does.

    Of them, `alone_bytes` are kept by no other snapshot: they are what goes with it. Both are None
    if its manifest is not known.
    """

    snapshot: Snapshot
    size_bytes: int | None
    alone_bytes: int | None


def pinned_by_snapshots(
    current: Manifest,
    manifests: Mapping[int, Manifest],
    *,
    now_s: float,
    wal_bytes: Mapping[int, int] | None = None,
) -> list[Pinned]:
    """The unexpired snapshots of the current manifest, in its order.

    `manifests` are those that are known, by id, `wal_bytes` the sizes of the WAL objects (None:
    they are left out).
    """
    snapshots = [each for each in current.snapshots if not is_expired(each, now_s)]
    wal = wal_bytes or {}
    kept = kept_by(current, wal)
    beyond: dict[bytes, Sizes] = {}
    for snapshot in snapshots:
        manifest = _manifest(snapshot, current, manifests)
        if manifest is not None:
            found = kept_by(manifest, wal)
            beyond[snapshot.id] = {key: found[key] for key in found.keys() - kept.keys()}
    holders = Counter(chain.from_iterable(beyond.values()))
    return [_pinned(snapshot, beyond.get(snapshot.id), holders) for snapshot in snapshots]


def kept_by(manifest: Manifest, wal_bytes: Mapping[int, int]) -> Sizes:
    """What a manifest keeps while it is active: its SSTs, and the WAL from c on (c included)."""
    kept: Sizes = {}
    for table in (manifest.leveled_ssts, *(load.ssts for load in manifest.pending_loads)):
        sizes = struct.unpack(f"<{table.count}Q", table.sizes_bytes)
        ids = (id_ for (id_,) in struct.iter_unpack(f"{ID_BYTES}s", table.ids))
        kept.update(zip(ids, sizes, strict=True))
    first = manifest.wal_id_last_compacted or 0
    kept.update((wal_id, size) for wal_id, size in wal_bytes.items() if wal_id >= first)
    return kept


def _manifest(
    snapshot: Snapshot, current: Manifest, manifests: Mapping[int, Manifest]
) -> Manifest | None:
    if snapshot.manifest_id == current.manifest_id:
        return current
    return manifests.get(snapshot.manifest_id)


def _pinned(snapshot: Snapshot, beyond: Sizes | None, holders: Mapping[bytes | int, int]) -> Pinned:
    if beyond is None:
        return Pinned(snapshot, None, None)
    alone = sum(size for key, size in beyond.items() if holders[key] == 1)
    return Pinned(snapshot, sum(beyond.values()), alone)
