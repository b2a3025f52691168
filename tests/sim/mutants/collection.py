"""Mutants of edits of the manifest, and of the collector: rules F1 to F3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shalekv.format.block import Block
from shalekv.format.coding import MAX_U64, Piece
from shalekv.format.columns import Columns
from shalekv.format.filter import Filter
from shalekv.jobs import collect
from shalekv.jobs.backup import create
from shalekv.jobs.collect import CollectJob, Fences
from shalekv.jobs.fsck import check
from shalekv.jobs.fsck.objects import ActiveManifestSet, NamedSst
from shalekv.protocol import retention
from shalekv.protocol import retention as expiry
from shalekv.protocol.compaction import publish
from shalekv.protocol.entry import Entry, RangeTombstones
from shalekv.protocol.manifest import Lease, Manifest, Snapshot
from shalekv.protocol.retention import Listed, LiveObjects, Reason, RetentionVerdict, expire
from shalekv.protocol.snapshot import NEVER, find_snapshot
from shalekv.protocol.sst_table import SstInfo
from shalekv.read import sst_reader
from shalekv.store.cas import CasStore
from shalekv.store.manifests import Landed, StoredManifest
from shalekv.write import opening as log_opening
from shalekv.write import snapshots
from shalekv.write.logical_time import LogicalTime
from shalekv.write.quorum import opening
from tests.sim.planting import mutant

_real_columns = Block.columns
_real_find = Block.find
_real_may_contain_hash = Filter.may_contain_hash


def _all_but_the_last(self: Block) -> Columns:
    columns = _real_columns(self)
    count = len(columns.keys)
    return columns if count == 1 else columns.rows(0, count - 1)


def _not_the_last(self: Block, key: bytes, seq: int = MAX_U64) -> Entry | None:
    return None if len(self) > 1 and key == self.last_key else _real_find(self, key, seq)


def _some_are_denied(self: Filter, hashed: int) -> bool:
    return bool(hashed % 5) and _real_may_contain_hash(self, hashed)


def _any_checksum(_self: Piece, _expected: int, _what: str) -> None:
    """It is taken for right."""


def _by_its_lease(info: SstInfo) -> tuple[bytes]:
    return (info.id[:8],)


def _clock_time(self: LogicalTime) -> int:
    return int(self._clock.monotonic_ms() + self._offset_ms) - 30_000


async def _whatever_it_shows(store: CasStore, *_: object) -> LogicalTime:
    now_ms = await store.now_ms()
    return LogicalTime(store.runtime.clock, store_now_ms=now_ms, jump_max_ms=3_600_000)


def _wherever_it_jumps(self: LogicalTime, store_now_ms: int, _took_ms: float) -> int:
    self._store_offset_ms = self._offset_ms = store_now_ms - self._clock.monotonic_ms()
    return store_now_ms


def _found_anyhow(_self: RangeTombstones, _key: bytes, found: Entry | None) -> Entry | None:
    return found


FORMAT = (
    mutant("lose the last entry of a block", (Block, "columns", _all_but_the_last), hint=14),
    mutant("the last entry of a block is not found", (Block, "find", _not_the_last), hint=3),
    mutant(
        "a filter denies a key that is there",
        (Filter, "may_contain_hash", _some_are_denied),
        hint=3,
    ),
    mutant("ignore a checksum", (Piece, "verify", _any_checksum)),
    mutant("a cache returns another SST", (sst_reader, "_key", _by_its_lease), hint=10),
    mutant("logical time goes back", (LogicalTime, "now_ms", _clock_time), hint=10),
    mutant(
        "an opening believes the store's clock",
        (log_opening, "first_time", _whatever_it_shows),
        (opening, "first_time", _whatever_it_shows),
        hint=11,
    ),
    mutant(
        "a writer follows the store's clock anywhere",
        (LogicalTime, "follow", _wherever_it_jumps),
        hint=6,
    ),
    mutant("range deletes hide nothing in memory", (RangeTombstones, "latest", _found_anyhow)),
)


# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_unless_young = retention._unless_young


async def _no_fences(_self: Fences, _listed: object) -> frozenset[str]:
    return frozenset()


async def _created_is_landed(self: StoredManifest, edited: Manifest, _landed: Landed) -> bool:
    self._see(edited)
    return True


async def _publish_nothing(
    _self: CollectJob, stored: StoredManifest, survey: collect._Survey
) -> Manifest:
    return expire(
        stored.current, survey.now_ms / 1_000, survey.cutoffs.cutoff_ms, retained=survey.retained
    )


def _lease_expired_at_once(lease: Lease, now_s: float) -> bool:
    return lease.expire_time_s != NEVER and lease.expire_time_s <= now_s


def _snapshot_expired_at_once(snapshot: Snapshot, now_s: float) -> bool:
    return snapshot.snapshot_expire_time_s != NEVER and snapshot.snapshot_expire_time_s <= now_s


def _young_is_old(listed: Listed, cutoff_ms: int, going: Reason) -> RetentionVerdict:
    return _real_unless_young(listed, cutoff_ms + 1, going)


def _behind_c(self: LiveObjects) -> int:
    return 0 if self.wal_id_last_compacted is None else self.wal_id_last_compacted + 1


def _no_lease_protects(_lease_id: bytes, _sst_id: bytes) -> bool:
    return False


def _any_lease(_manifest: Manifest, _lease_id: bytes) -> None:
    """It is taken for one that is there."""


def _renewed_anyhow(
    manifest: Manifest, snapshot_id: bytes, *, expire_time_s: int, now_s: float
) -> Manifest:
    """A snapshot that is gone comes back, of the manifest that is there now or was there then."""
    del now_s
    found = find_snapshot(manifest, snapshot_id)
    if found is None:
        gone = Snapshot(snapshot_id, manifest.manifest_id, expire_time_s)
        return replace(manifest, snapshots=(*manifest.snapshots, gone))
    renewed = replace(found, snapshot_expire_time_s=expire_time_s)
    others = tuple(each for each in manifest.snapshots if each.id != snapshot_id)
    return replace(manifest, snapshots=(*others, renewed))


def _nothing_pinned(_manifest: Manifest, *, with_wal: bool = False) -> Iterable[tuple[int, str]]:
    del with_wal
    return iter(())


def _all_of_them(manifest: Manifest, _recorded: object) -> Manifest:
    return manifest


def _named_at_all(_scope: object, active: ActiveManifestSet) -> Iterable[NamedSst]:
    return active.ssts()


COLLECTION = (
    mutant("skip F1", (Fences, "among", _no_fences)),
    mutant("skip F2", (StoredManifest, "_has_landed", _created_is_landed), hint=16),
    mutant("skip F3", (CollectJob, "_publish", _publish_nothing), hint=3),
    mutant(
        "<= for < in collection: leases",
        (expiry, "is_lease_expired", _lease_expired_at_once),
        hint=16,
    ),
    mutant(
        "<= for < in collection: snapshots",
        (expiry, "is_expired", _snapshot_expired_at_once),
        hint=11,
    ),
    mutant("<= for < in collection: slots", (LiveObjects, "first_wal_id", property(_behind_c))),
    mutant("<= for < in collection: ages", (retention, "_unless_young", _young_is_old), hint=1),
    mutant("the collector ignores leases", (retention, "protects", _no_lease_protects), hint=5),
    mutant("the collector ignores snapshots", (retention, "_pinned", _nothing_pinned)),
    mutant(
        "publish without a lease",
        (publish, "check_lease", _any_lease),
        also=("ObjectNotFound",),
        hint=109,
    ),
    mutant(
        "a renewal brings back a snapshot", (snapshots, "renew_snapshot", _renewed_anyhow), hint=49
    ),
    mutant(
        "a backup copies every load",
        (create, "drop_unrecorded", _all_of_them),
        seeds=120,
        hint=46,
    ),
    mutant("fsck expects every load", (check, "_needed", _named_at_all), seeds=120, hint=20),
)
