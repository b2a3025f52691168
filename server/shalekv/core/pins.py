"""What each snapshot keeps from being deleted."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.origins import foreign_ids
from shalekv.protocol.snapshot import is_expired
from shalekv.protocol.sst_table import ID_BYTES, SstTable

Sizes = dict[bytes | int, int]  # object -> bytes: SSTs by their ids, WAL objects by theirs


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one manifest keeps while it is active, packed: 24 bytes for an SST."""

    sst_ids: bytes
    sst_sizes: bytes
    first_wal_id: int  # c itself is kept

    @classmethod
    def of(cls, manifest: Manifest) -> Holdings:
        """What this manifest keeps in its own folders, pending loads included."""
        levels = manifest.leveled_ssts
        if manifest.origins:
            foreign = foreign_ids(manifest.origins)
            levels = SstTable.from_infos(info for info in levels if info.id not in foreign)
        tables = (levels, *(load.ssts for load in manifest.pending_loads))
        return cls(
            b"".join(table.ids for table in tables),
            b"".join(table.sizes_bytes for table in tables),
            manifest.wal_id_last_compacted or 0,
        )

    def sizes(self, wal_bytes: Mapping[int, int]) -> Sizes:
        """The bytes of each object; `wal_bytes` are those of the WAL."""
        count = len(self.sst_ids) // ID_BYTES
        ids = (id_ for (id_,) in struct.iter_unpack(f"{ID_BYTES}s", self.sst_ids))
        kept: Sizes = dict(zip(ids, struct.unpack(f"<{count}Q", self.sst_sizes), strict=True))
        kept.update((w, size) for w, size in wal_bytes.items() if w >= self.first_wal_id)
        return kept


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
    known: Mapping[int, Holdings],
    *,
    now_s: float,
    wal_bytes: Mapping[int, int] | None = None,
) -> list[Pinned]:
    """The unexpired snapshots of the current manifest, in its order.

    `known` is what manifests keep, by id, `wal_bytes` the sizes of the WAL objects (None: they are
    left out).
    """
    snapshots = [each for each in current.snapshots if not is_expired(each, now_s)]
    wal = wal_bytes or {}
    own = Holdings.of(current)
    kept = own.sizes(wal)
    beyond: dict[bytes, Sizes] = {}
    for snapshot in snapshots:
        is_own = snapshot.manifest_id == current.manifest_id
        holdings = own if is_own else known.get(snapshot.manifest_id)
        if holdings is not None:
            sizes = holdings.sizes({} if snapshot.ssts_only else wal)
            beyond[snapshot.id] = {key: sizes[key] for key in sizes.keys() - kept.keys()}
    holders = Counter(chain.from_iterable(beyond.values()))
    return [_pinned_by(snapshot, beyond.get(snapshot.id), holders) for snapshot in snapshots]


def _pinned_by(
    snapshot: Snapshot, beyond: Sizes | None, holders: Mapping[bytes | int, int]
) -> Pinned:
    if beyond is None:
        return Pinned(snapshot, None, None)
    alone = sum(size for key, size in beyond.items() if holders[key] == 1)
    return Pinned(snapshot, sum(beyond.values()), alone)
