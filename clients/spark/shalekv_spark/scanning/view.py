"""One state of a database for many tasks: a snapshot, and everything that it includes.

A snapshot keeps the objects of one manifest: the SSTs of its levels, and the WAL behind them up to
`wal_id_last_seen`. None of these ever changes, so every process with the id of the snapshot finds
the same state as long as the snapshot lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.errors import (
    CorruptObject,
    IllegalState,
    ObjectNotFound,
    SnapshotNotFound,
)
from shalekv.protocol.loads import load_version
from shalekv.protocol.manifest import Manifest, Snapshot, SortedRun, Version
from shalekv.protocol.snapshot import find_snapshot, is_expired
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import check_pins
from shalekv.store.active_manifests import read_pinned
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import GAP_WAIT_MS, Snapshots, SnapshotSeqs
from shalekv_spark.scanning.wal_tail import Tail, read_tail

TTL_S_MAX = 30 * 86_400  # the longest time that a snapshot outlives a process that was killed
_MS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class SnapshotPin:
    """The snapshot that is read."""

    snapshot_id: bytes
    seq: int  # of the last commit that it includes
    called: str  # its name, or else its id
    # Its lifetime without a renewal, if its readers renew it; 0: its owner does.
    ttl_s: int = 0


@dataclass(frozen=True, slots=True)
class VisibleState:
    """The state in a snapshot. Sequence numbers alone say which of two versions is newer."""

    pin: SnapshotPin
    manifest: Manifest  # that the snapshot keeps
    runs: Sequence[SortedRun]  # of the levels, L0 and loads too: each SST of L0 is one
    tail: Tail
    now_ms: int  # logical time at which it is read

    @property
    def seq(self) -> int:
        """The sequence number of the last commit in the state."""
        return self.tail.seq

    @property
    def ssts(self) -> list[SstInfo]:
        """The SSTs of all runs."""
        return [info for run in self.runs for info in run.ssts]


async def pin_new(store: CasStore, *, ttl_s: int) -> SnapshotPin:
    """Create a snapshot of the current state, which includes everything acknowledged before.

    Raises `DatabaseNotFound`, `DatabaseMismatch`, `OriginLost`, `CorruptObject`, `ManifestConflict`
    and `StoreError`.
    """
    stored = StoredManifest(store)
    await stored.refresh()
    await check_pins(store, stored.current, may_fix=False)
    snapshots = Snapshots(store, stored)
    created = await snapshots.create(ttl_ms=ttl_s * _MS_PER_S, gap_wait_ms=GAP_WAIT_MS)
    return await _pin(store, stored.current, created, ttl_s)


async def pin_existing(store: CasStore, called: str) -> SnapshotPin:
    """Return the snapshot with this name or id, which its owner keeps.

    Raises `SnapshotNotFound`, which names it, `DatabaseNotFound`, `DatabaseMismatch`,
    `CorruptObject` and `StoreError`.
    """
    stored = StoredManifest(store)
    await stored.refresh()
    found = await Snapshots(store, stored).find(called)
    now_s = await store.now_ms() / _MS_PER_S
    if found.ssts_only or is_expired(found, now_s):
        raise _gone(called, stored.current)
    await check_pins(store, stored.current, may_fix=False)
    return await _pin(store, stored.current, found, 0)


async def renew_pin(store: CasStore, pin: SnapshotPin) -> None:
    """Renew a snapshot of this process. Raises `SnapshotNotFound` and as `pin_new` does."""
    called = pin.snapshot_id.hex()
    await Snapshots(store).renew(called, ttl_ms=pin.ttl_s * _MS_PER_S)


async def remove_pin(store: CasStore, pin: SnapshotPin) -> None:
    """Remove a snapshot of this process. Raises `SnapshotNotFound` and as `pin_new` does."""
    await Snapshots(store).delete(pin.snapshot_id.hex())


async def check_living(store: CasStore, pin: SnapshotPin) -> None:
    """Raise `SnapshotNotFound` if the snapshot is gone, or has expired."""
    await _living(store, StoredManifest(store), pin)


async def open_view(
    store: CasStore, pin: SnapshotPin, *, tail_memory_bytes: int, all_versions: bool = False
) -> VisibleState:
    """Open the state of a snapshot, with at most `tail_memory_bytes` of entries of the WAL.

    Raises `SnapshotNotFound` when it is gone, `CorruptObject`, `IllegalState` and `StoreError`.
    """
    stored = StoredManifest(store)
    snapshot = await _living(store, stored, pin)
    try:
        manifest = stored.current
        if snapshot.manifest_id != manifest.manifest_id:
            manifest, _ = await read_pinned(store, manifest, snapshot.manifest_id)
        tree = await store.runtime.workers.run(Version.of, manifest)
        tail = await read_tail(
            store, manifest, memory_bytes=tail_memory_bytes, all_versions=all_versions
        )
    except (ObjectNotFound, IllegalState, CorruptObject) as error:
        await _still_living(store, stored, pin, error)
        raise
    # A collected slot could be filled again (F1): what was read is valid if the snapshot has kept
    # it until now.
    await _living(store, stored, pin)
    runs = [SortedRun.of(info.level, [info]) for info in tree.l0]
    loads = [run for load in reversed(tail.loads) for run in load_version(load).runs]
    now_ms = max(snapshot.created_ms, tail.logical_time_ms)
    return VisibleState(pin, manifest, [*loads, *runs, *tree.runs], tail, now_ms)


async def _living(store: CasStore, stored: StoredManifest, pin: SnapshotPin) -> Snapshot:
    """Return the snapshot in the current manifest, which is read now. Raises `SnapshotNotFound`."""
    current = await stored.refresh()
    found = find_snapshot(current, pin.snapshot_id)
    now_s = await store.now_ms() / _MS_PER_S
    if found is None or found.ssts_only or is_expired(found, now_s):
        raise _gone(pin.called, current)
    return found


async def _still_living(
    store: CasStore, stored: StoredManifest, pin: SnapshotPin, error: Exception
) -> None:
    """Raise `SnapshotNotFound` from `error` if the snapshot is gone."""
    try:
        await _living(store, stored, pin)
    except SnapshotNotFound as gone:
        raise gone from error


async def _pin(store: CasStore, current: Manifest, snapshot: Snapshot, ttl_s: int) -> SnapshotPin:
    seqs = await SnapshotSeqs(store).of(current, [snapshot])
    called = snapshot.name or snapshot.id.hex()
    return SnapshotPin(snapshot.id, seqs[snapshot.id], called, ttl_s)


def _gone(called: str, manifest: Manifest) -> SnapshotNotFound:
    return SnapshotNotFound(
        f"snapshot {called} is not in manifest {manifest.manifest_id}, has expired, or keeps no "
        "WAL: what it protected may be deleted. Begin again from the current state"
    )
