"""Retention: which objects a collector must keep, and for what reason (I8). Pure.

The rules are F1 and F3 of server/docs/protocol.md. A collection (`jobs.collect`) has three steps:

1. List the objects.
2. Publish the edit `expire`. It drops the snapshots and leases that have expired by the store's
   clock, so that a process which renews one, or publishes under it, finds it gone. It also raises
   `gc_cutoff_ms`: later edits refuse new objects that are older than that, unless they are leased.
3. Delete the objects that `Retention`, built from that manifest, allows to delete.

So the listing is older than the manifest by which it is judged. An object that a later edit makes
reachable is not in the listing, or protected by a lease that this manifest still has, or was last
modified at its `gc_cutoff_ms` or later. No object that may be deleted is ever needed again, however
late it is deleted.

A manifest is active if it is the current one or if a snapshot in the current one names it
(`protocol.snapshot`). Its `LiveObjects` are kept: this is how a snapshot protects files. Only
`expire` considers the expiry times of snapshots and leases; all that are still in the manifest
count.

Compacted WAL objects may be kept longer, for watches that begin late (`WalRetention`). This only
ever keeps more than the other rules. `pinned_by_snapshots` reports how many bytes snapshots keep.
"""

from __future__ import annotations

import enum
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from shalekv.protocol.lease import (
    find_wal_lease,
    first_protected_wal_id,
    hold_wal,
    protects,
    release_wal,
)
from shalekv.protocol.manifest import Lease, Manifest, Snapshot
from shalekv.protocol.origins import foreign_ids, needed_pins, unpacked
from shalekv.protocol.snapshot import NEVER, is_expired
from shalekv.wording import moment

RETENTION_HOLDER = "wal retention"  # of the lease by which the collector keeps compacted WAL
SIZE_BYTES = 8
Sizes = dict[bytes | int, int]  # size in bytes of each object: SSTs and WAL objects by their ids


class Folder(enum.StrEnum):
    """The folder of an object, in the order in which garbage is deleted.

    Manifests are deleted first, so that no existing manifest names a deleted object. Within a
    folder objects are deleted by name, so that a crash leaves no hole in the WAL.
    """

    MANIFEST = "manifest"
    WAL = "wal"
    LEVELS = "levels"
    ACCESS = "access"


class Reason(enum.StrEnum):
    """The reason why an object is kept, or may be deleted."""

    # The object is kept.
    CURRENT = "part of the current state"
    SNAPSHOT = "kept by a snapshot"
    LEASE = "kept by a lease"
    PENDING_LOAD = "part of a load that is not committed"
    FENCE = "fence"
    NOT_BELOW_C = "not yet merged into the levels"
    LAST_MERGED = "last one merged into the levels"
    RETAINED = "merged, kept for watches (--wal-retention-s)"
    POLICY = "access policy"
    YOUNG = "not needed, too young to delete"
    YOUNG_FOREIGN = "not made by ShaleKV, too young to delete"

    # The object may be deleted.
    INACTIVE = "older manifest"
    BELOW_C = "merged into the levels"
    UNREACHABLE = "not needed"
    OLD_FOREIGN = "not made by ShaleKV"


_DELETABLE = frozenset(
    {
        Reason.INACTIVE,
        Reason.BELOW_C,
        Reason.UNREACHABLE,
        Reason.OLD_FOREIGN,
    }
)


@dataclass(frozen=True, slots=True)
class RetentionVerdict:
    """The verdict on an object; `detail` says more about what keeps it."""

    reason: Reason
    detail: str = ""

    @property
    def may_delete(self) -> bool:
        """Return whether the object may be deleted."""
        return self.reason in _DELETABLE


_LAST_MERGED = RetentionVerdict(Reason.LAST_MERGED, "readers and writers begin there")


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as it was listed. It is foreign if it has neither a number nor an SST id."""

    folder: Folder
    name: str
    size_bytes: int
    modified_ms: int  # by the store's clock
    number: int | None = None  # of a manifest, a WAL object or an access policy
    sst_id: bytes | None = None

    @property
    def is_foreign(self) -> bool:
        """Return whether its name is not one that ShaleKV gives."""
        return self.number is None and self.sst_id is None


@dataclass(frozen=True, slots=True)
class WalRetention:
    """Limits of the compacted WAL objects that are kept.

    They are a run without a hole that ends at c. It begins with the oldest object that was last
    modified at `kept_from_ms` or later, by the store's clock, but has at most `bytes_max` bytes.
    """

    kept_from_ms: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """Times of the store's clock; objects that were last modified before them may be deleted."""

    cutoff_ms: int
    foreign_ms: int  # for objects that are not ours
    wal: WalRetention | None = None  # the compacted WAL objects to keep; None: none

    @classmethod
    def at(
        cls,
        now_ms: int,
        *,
        collect_age_s: int,
        foreign_file_age_s: int,
        wal_retention_s: int = 0,
        wal_retention_bytes: int = 0,
    ) -> Cutoffs:
        """Return the cutoffs at `now_ms`. No object younger than `collect_age_s` may be deleted."""
        cutoff_ms = max(now_ms - 1_000 * collect_age_s, 0)
        foreign_ms = min(cutoff_ms, now_ms - 1_000 * foreign_file_age_s)
        if not wal_retention_s:
            return cls(cutoff_ms, foreign_ms)
        retention = WalRetention(now_ms - 1_000 * wal_retention_s, wal_retention_bytes)
        return cls(cutoff_ms, foreign_ms, retention)


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """The objects that one active manifest keeps: its SSTs, those of loads, the WAL from c on."""

    manifest_id: int
    wal_id_last_compacted: int | None
    sst_ids: bytes  # of the levels, 16 bytes each
    sst_sizes: bytes  # 8 bytes for each SST of the levels, then for those of the loads
    loads: tuple[tuple[str, bytes], ...] = ()  # id of a pending load, and the ids of its SSTs
    origin_pins: frozenset[bytes] = frozenset()  # snapshots in other databases: `protocol.origins`

    @classmethod
    def of(cls, manifest: Manifest) -> LiveObjects:
        """Return the objects that a manifest keeps as long as it is active."""
        levels, loads = manifest.leveled_ssts, manifest.pending_loads
        return cls(
            manifest.manifest_id,
            manifest.wal_id_last_compacted,
            levels.ids,
            _own_sizes(manifest) + b"".join(load.ssts.sizes_bytes for load in loads),
            tuple((load.load_id, load.ssts.ids) for load in loads),
            frozenset(needed_pins(manifest)),
        )

    @property
    def first_wal_id(self) -> int:
        """The first WAL object that is kept: c itself, or 0 if nothing is compacted."""
        return self.wal_id_last_compacted or 0

    def sizes(self, wal_bytes: Mapping[int, int]) -> Sizes:
        """Return the size of each object that is kept; `wal_bytes` has those of all WAL objects.

        The size of an SST in another database is 0: this database does not keep it.
        """
        ids = chain(unpacked(self.sst_ids), *(unpacked(ids) for _, ids in self.loads))
        sizes = struct.unpack(f"<{len(self.sst_sizes) // SIZE_BYTES}Q", self.sst_sizes)
        kept: Sizes = dict(zip(ids, sizes, strict=True))
        kept.update((w, size) for w, size in wal_bytes.items() if w >= self.first_wal_id)
        return kept


def _own_sizes(manifest: Manifest) -> bytes:
    """Return the packed sizes of the SSTs of the levels: 0 for those in other databases."""
    levels, foreign = manifest.leveled_ssts, foreign_ids(manifest.origins)
    if not foreign:
        return levels.sizes_bytes
    sizes = (0 if info.id in foreign else info.size_bytes for info in levels)
    return struct.pack(f"<{len(levels)}Q", *sizes)


class Retention:
    """Judges the objects of one listing, by a manifest that was current after the listing."""

    def __init__(
        self,
        manifest: Manifest,
        live: Iterable[LiveObjects],
        cutoffs: Cutoffs,
        *,
        fences: Collection[str] = (),
        retained: int | None = None,
    ) -> None:
        """Judge by `manifest`, and by the `live` objects of all active manifests.

        `fences` are the names of the WAL objects that are fences, which are never collected (F1).
        WAL objects from `retained` on are kept in any case (see `retained_from`). Raises
        `ValueError` if the live objects of an active manifest are missing.
        """
        by_id = _by_id(manifest, live)
        self._manifest_id = manifest.manifest_id
        self._leases = manifest.leases
        self._cutoffs = cutoffs
        # An object at or above the manifest's own cutoff may still be published without a lease.
        self._sst_cutoff_ms = min(cutoffs.cutoff_ms, manifest.gc_cutoff_ms)
        self._fences = frozenset(fences)
        self._manifests = _kept_manifests(manifest)
        self._ssts = _kept_ssts(manifest, by_id)
        self._wal = _wal_holds(manifest, by_id)
        self._last_merged = by_id[manifest.manifest_id].wal_id_last_compacted
        self._retained = retained

    def judge(self, listed: Listed) -> RetentionVerdict:
        """Return whether this object is kept or may be deleted, and why."""
        if listed.is_foreign:
            is_old = listed.modified_ms < self._cutoffs.foreign_ms
            return RetentionVerdict(Reason.OLD_FOREIGN if is_old else Reason.YOUNG_FOREIGN)
        if listed.folder is Folder.ACCESS:
            return RetentionVerdict(Reason.POLICY)  # all versions: no name is ever used again
        if listed.folder is Folder.MANIFEST:
            return self._judge_manifest(listed)
        return self._judge_wal(listed) if listed.folder is Folder.WAL else self._judge_sst(listed)

    def _judge_manifest(self, listed: Listed) -> RetentionVerdict:
        number = listed.number or 0
        kept = self._manifests.get(number)
        if kept is not None:
            return kept
        if number >= self._manifest_id:
            return RetentionVerdict(Reason.CURRENT, f"newer than manifest {self._manifest_id}")
        # No edit makes an inactive manifest active again, so `gc_cutoff_ms` does not matter here.
        return _unless_young(listed, self._cutoffs.cutoff_ms, Reason.INACTIVE)

    def _judge_wal(self, listed: Listed) -> RetentionVerdict:
        number = listed.number or 0
        for hold in self._wal:
            if number >= hold.first:
                return _LAST_MERGED if number == self._last_merged else hold.verdict
        if self._retained is not None and number >= self._retained:
            return RetentionVerdict(Reason.RETAINED)
        if listed.name in self._fences:
            return RetentionVerdict(Reason.FENCE, "keeps older writers out")
        return _unless_young(listed, self._sst_cutoff_ms, Reason.BELOW_C)

    def _judge_sst(self, listed: Listed) -> RetentionVerdict:
        sst_id = listed.sst_id or b""
        kept = self._ssts.get(sst_id)
        if kept is not None:
            return kept
        for lease in self._leases:
            if protects(lease.id, sst_id):
                return RetentionVerdict(Reason.LEASE, lease.holder)
        return _unless_young(listed, self._sst_cutoff_ms, Reason.UNREACHABLE)


def active_manifest_ids(manifest: Manifest) -> frozenset[int]:
    """Return the ids of the manifests that are active while this one is current."""
    return frozenset((manifest.manifest_id, *(s.manifest_id for s in manifest.snapshots)))


def first_kept_wal_id(manifest: Manifest, live: Iterable[LiveObjects]) -> int:
    """Return the first WAL object that a manifest, a snapshot or a lease keeps.

    Objects before it may be deleted, unless they are fences, retained or too young. Arguments and
    errors are those of `Retention`.
    """
    return _wal_holds(manifest, _by_id(manifest, live))[-1].first


def snapshot_label(snapshot: Snapshot) -> str:
    """Return the name of a snapshot for operators: its name, or its id."""
    return snapshot.name or snapshot.id.hex()


def _by_id(manifest: Manifest, live: Iterable[LiveObjects]) -> dict[int, LiveObjects]:
    by_id = {each.manifest_id: each for each in live}
    missing = sorted(active_manifest_ids(manifest) - by_id.keys())
    if missing:
        raise ValueError(f"manifests {missing} are active, and what they keep is not known")
    return by_id


def _unless_young(listed: Listed, cutoff_ms: int, deletable: Reason) -> RetentionVerdict:
    """Return the verdict `deletable` for an object older than the cutoff, and else `YOUNG`."""
    if listed.modified_ms < cutoff_ms:
        return RetentionVerdict(deletable)
    return RetentionVerdict(Reason.YOUNG, f"only what is older than {moment(cutoff_ms)}")


def _pinned(manifest: Manifest, *, with_wal: bool = False) -> Iterator[tuple[int, str]]:
    """Iterate over the other manifests that snapshots name, with the label of the snapshot.

    A manifest comes once for each of its snapshots. With `with_wal` only snapshots count that keep
    WAL objects too.
    """
    for snapshot in manifest.snapshots:
        if with_wal and snapshot.ssts_only:
            continue
        if snapshot.manifest_id != manifest.manifest_id:
            detail = f"{snapshot_label(snapshot)} of manifest {snapshot.manifest_id}"
            yield snapshot.manifest_id, detail


def _kept_manifests(manifest: Manifest) -> dict[int, RetentionVerdict]:
    kept = {manifest.manifest_id: RetentionVerdict(Reason.CURRENT)}
    for manifest_id, detail in _pinned(manifest):
        kept.setdefault(manifest_id, RetentionVerdict(Reason.SNAPSHOT, detail))
    return kept


def _kept_ssts(manifest: Manifest, by_id: dict[int, LiveObjects]) -> dict[bytes, RetentionVerdict]:
    own = by_id[manifest.manifest_id]
    kept: dict[bytes, RetentionVerdict] = {}

    def keep(ids: bytes, verdict: RetentionVerdict) -> None:
        for sst_id in unpacked(ids):
            kept.setdefault(sst_id, verdict)

    keep(own.sst_ids, RetentionVerdict(Reason.CURRENT, f"manifest {manifest.manifest_id}"))
    for load_id, ids in own.loads:
        keep(ids, RetentionVerdict(Reason.PENDING_LOAD, load_id))
    # Of several snapshots of one manifest, the first is the reason that is given.
    for manifest_id, detail in dict(reversed([*_pinned(manifest)])).items():
        live = by_id[manifest_id]
        verdict = RetentionVerdict(Reason.SNAPSHOT, detail)
        keep(live.sst_ids, verdict)
        for _, ids in live.loads:
            keep(ids, verdict)
    return kept


@dataclass(frozen=True, slots=True)
class _WalHold:
    """A reason to keep the WAL objects from `first` on."""

    first: int
    verdict: RetentionVerdict


def _wal_holds(manifest: Manifest, by_id: dict[int, LiveObjects]) -> tuple[_WalHold, _WalHold]:
    """Return the hold of the current manifest, and the hold that keeps most."""
    own = by_id[manifest.manifest_id]
    current = _WalHold(own.first_wal_id, RetentionVerdict(Reason.NOT_BELOW_C, _merged_text(own)))
    others = [current]
    for manifest_id, detail in _pinned(manifest, with_wal=True):
        live = by_id[manifest_id]
        verdict = RetentionVerdict(Reason.NOT_BELOW_C, f"{_merged_text(live)} in snapshot {detail}")
        others.append(_WalHold(live.first_wal_id, verdict))
    others += [
        _WalHold(lease.wal_id_min, RetentionVerdict(Reason.LEASE, lease.holder))
        for lease in manifest.leases
        if lease.wal_id_min is not None
    ]
    return current, min(others, key=lambda hold: hold.first)


def _merged_text(live: LiveObjects) -> str:
    c = live.wal_id_last_compacted
    return "nothing is merged yet" if c is None else f"merged up to WAL {c}"


def is_lease_expired(lease: Lease, now_s: float) -> bool:
    """Return whether the lease has expired at `now_s` of the store's clock, so that `expire` drops
    it.
    """
    return lease.expire_time_s != NEVER and lease.expire_time_s < now_s


def expire(
    manifest: Manifest, now_s: float, cutoff_ms: int, *, retained: int | None = None
) -> Manifest:
    """Return the manifest to publish before anything is deleted (F3).

    It lacks the snapshots and leases that have expired at `now_s` of the store's clock, and has
    this cutoff or a later one. A lease protects WAL objects from `retained` on, see `retain_wal`.
    """
    expired = replace(
        manifest,
        snapshots=tuple(s for s in manifest.snapshots if not is_expired(s, now_s)),
        leases=tuple(lease for lease in manifest.leases if not is_lease_expired(lease, now_s)),
        gc_cutoff_ms=max(manifest.gc_cutoff_ms, cutoff_ms),
    )
    return retain_wal(expired, retained)


def is_expiry_published(
    manifest: Manifest, now_s: float, cutoff_ms: int, *, retained: int | None = None
) -> bool:
    """Return whether the manifest contains the edit `expire` with these arguments (F2).

    Another collector's edit counts as well: only the contents of the manifest matter.
    """
    return manifest == expire(manifest, now_s, cutoff_ms, retained=retained)


def is_edit_needed(current: Manifest, expired: Manifest, deletable: Iterable[Listed]) -> bool:
    """Return whether `expired` must be published before the objects `deletable` are deleted.

    `deletable` are the objects that may be deleted if `expired` is current. No edit is needed for
    objects that are older than the published cutoff: no edit that has not seen it can succeed any
    more. Nor for manifests, which no edit makes active again: each edit leaves an inactive manifest
    behind, and a collector must not go on for ever with its own.
    """
    if (current.snapshots, current.leases) != (expired.snapshots, expired.leases):
        return True
    return any(
        listed.modified_ms >= current.gc_cutoff_ms
        for listed in deletable
        if listed.folder is not Folder.MANIFEST and not listed.is_foreign
    )


def retained_from(
    manifest: Manifest, listing: Iterable[Listed], retention: WalRetention | None
) -> int:
    """Return the first WAL object that this retention keeps; c itself if it keeps none below c."""
    c = manifest.wal_id_last_compacted or 0
    if retention is None:
        return c
    compacted = _listed_below(c, listing)
    first, size_bytes = c, 0
    for wal_id in range(c - 1, -1, -1):
        listed = compacted.get(wal_id)
        if listed is None:
            break
        size_bytes += listed.size_bytes
        if size_bytes > retention.bytes_max:
            break
        if listed.modified_ms >= retention.kept_from_ms:
            first = wal_id
    return first


def _listed_below(c: int, listing: Iterable[Listed]) -> Mapping[int, Listed]:
    """Return the listed WAL objects below c, by id."""
    return {
        listed.number: listed
        for listed in listing
        if listed.folder is Folder.WAL and listed.number is not None and listed.number < c
    }


def retain_wal(manifest: Manifest, wal_id_min: int | None) -> Manifest:
    """Return the manifest with a lease on the WAL objects from `wal_id_min` on; None: without one.

    Consumers find in this lease which objects they can protect in turn (`protocol.lease`). It
    protects only objects that nothing has given up before, so at first it may begin later than the
    run of `retained_from`. The collector keeps the objects in between too, but nothing may rely on
    that.
    """
    if wal_id_min is None:
        return release_wal(manifest, RETENTION_HOLDER)
    found = find_wal_lease(manifest, RETENTION_HOLDER)
    first = max(wal_id_min, first_protected_wal_id(manifest))
    if found is not None and found.wal_id_min is not None and first <= found.wal_id_min:
        return manifest
    return hold_wal(manifest, RETENTION_HOLDER, first, NEVER)


@dataclass(frozen=True, slots=True)
class PinnedBytes:
    """A snapshot, and the bytes that it keeps and the current manifest does not.

    `alone_bytes` of these are kept by no other snapshot: removing this one frees them. Both are
    None if its manifest is not known.
    """

    snapshot: Snapshot
    size_bytes: int | None
    alone_bytes: int | None


def pinned_by_snapshots(
    current: Manifest,
    known: Mapping[int, LiveObjects],
    *,
    now_s: float,
    wal_bytes: Mapping[int, int] | None = None,
) -> list[PinnedBytes]:
    """Return the unexpired snapshots of the current manifest, in its order, with their bytes.

    `known` has the live objects of manifests by id, `wal_bytes` the sizes of the WAL objects (None:
    the WAL is not counted).
    """
    snapshots = [each for each in current.snapshots if not is_expired(each, now_s)]
    wal = wal_bytes or {}
    own = LiveObjects.of(current)
    kept = own.sizes(wal)
    beyond: dict[bytes, Sizes] = {}
    for snapshot in snapshots:
        is_own = snapshot.manifest_id == current.manifest_id
        live = own if is_own else known.get(snapshot.manifest_id)
        if live is not None:
            sizes = live.sizes({} if snapshot.ssts_only else wal)
            beyond[snapshot.id] = {key: sizes[key] for key in sizes.keys() - kept.keys()}
    holders = Counter(chain.from_iterable(beyond.values()))
    return [_pinned_by(snapshot, beyond.get(snapshot.id), holders) for snapshot in snapshots]


def _pinned_by(
    snapshot: Snapshot, beyond: Sizes | None, holders: Mapping[bytes | int, int]
) -> PinnedBytes:
    if beyond is None:
        return PinnedBytes(snapshot, None, None)
    alone = sum(size for key, size in beyond.items() if holders[key] == 1)
    return PinnedBytes(snapshot, sum(beyond.values()), alone)
