"""Retention: which objects must stay, and for whom; everything else may go (I8).

The rules are those of seed 000, "Garbage Collectors", and F1 and F3 of the protocol. The listing is
older than the manifest that judges it. So whatever an edit makes reachable from then on is not in
the listing, or protected by a lease that this manifest still has, or last modified at its
`gc_cutoff_ms` or later: nothing that may go is ever needed again, however late it is deleted.

What makes a manifest active is that a snapshot in the judging manifest names it. Whether that has
expired is not asked here: `shalekv.protocol.retention` takes it out of the manifest before.
"""

from __future__ import annotations

import enum
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain

from shalekv.protocol.lease import (
    find_wal_lease,
    first_protected_wal_id,
    hold_wal,
    protects,
    release_wal,
)
from shalekv.protocol.manifest import Lease, Manifest, Snapshot
from shalekv.protocol.origins import foreign_ids, needed_pins
from shalekv.protocol.snapshot import NEVER, is_expired
from shalekv.protocol.sst_table import ID_BYTES, SstTable

# --- collectable
# Objects as a collector sees them, and what may become of each.


class Folder(enum.StrEnum):
    """Where an object is, in the order in which garbage is deleted.

    Manifests first: one that is there never names what is gone. Within a folder by name, so that
    what a crash leaves of the WAL has no hole.
    """

    MANIFEST = "manifest"
    WAL = "wal"
    LEVELS = "levels"


class Reason(enum.StrEnum):
    """Why an object stays, or goes."""

    CURRENT = "current manifest"
    SNAPSHOT = "pinned by snapshot"
    LEASE = "leased"
    PENDING_LOAD = "pending load"
    FENCE = "fence"
    NOT_BELOW_C = "not below c"
    RETAINED = "wal retention"
    YOUNG = "not old enough"
    YOUNG_FOREIGN = "not ours, not old enough"

    INACTIVE = "inactive manifest"
    BELOW_C = "below c"
    UNREACHABLE = "unreachable"
    OLD_FOREIGN = "not ours"


_GOING = frozenset(
    {
        Reason.INACTIVE,
        Reason.BELOW_C,
        Reason.UNREACHABLE,
        Reason.OLD_FOREIGN,
    }
)


@dataclass(frozen=True, slots=True)
class RetentionVerdict:
    """What becomes of an object: `detail` says for whom it stays."""

    reason: Reason
    detail: str = ""

    @property
    def goes(self) -> bool:
        """Whether the object may be deleted."""
        return self.reason in _GOING


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as it was listed. One that has neither number nor SST id is not ours."""

    folder: Folder
    name: str
    size_bytes: int
    modified_ms: int  # by the store's clock
    number: int | None = None  # of a manifest or a WAL object
    sst_id: bytes | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether its name is none that we give."""
        return self.number is None and self.sst_id is None


# --- wal_retention
# Retention of the WAL: what is compacted stays for a while, for watches that begin late. Pure.
#
# It is a run without a hole that ends at c: from the oldest object on that is young enough,
# unless the run is larger than is allowed. It only ever keeps more than the rules of
# `protocol.retention`. The collector claims it by a lease of its own, so that consumers find in the
# manifest what they may claim in turn (`protocol.lease`). That lease may lag behind the run at
# first: what was below c before there was a lease is left alone, but nobody can rely on it.


HOLDER = "wal retention"


@dataclass(frozen=True, slots=True)
class WalRetention:
    """How much stays: what was last modified at `young_ms` or later, by the store's clock."""

    young_ms: int
    bytes_max: int


def retained_from(
    manifest: Manifest, listing: Iterable[Listed], retention: WalRetention | None
) -> int:
    """The first WAL object that stays; c itself if none below it does."""
    c = manifest.wal_id_last_compacted or 0
    if retention is None:
        return c
    below = _below(c, listing)
    first, size_bytes = c, 0
    for wal_id in range(c - 1, -1, -1):
        listed = below.get(wal_id)
        if listed is None:
            break
        size_bytes += listed.size_bytes
        if size_bytes > retention.bytes_max:
            break
        if listed.modified_ms >= retention.young_ms:
            first = wal_id
    return first


def retain_wal(manifest: Manifest, wal_id_min: int | None) -> Manifest:
    """The manifest in which the objects from there on are kept, as far as they can be claimed.

    None: nothing is retained.
    """
    if wal_id_min is None:
        return release_wal(manifest, HOLDER)
    found = find_wal_lease(manifest, HOLDER)
    claimed = max(wal_id_min, first_protected_wal_id(manifest))
    if found is not None and found.wal_id_min is not None and claimed <= found.wal_id_min:
        return manifest
    return hold_wal(manifest, HOLDER, claimed, NEVER)


def _below(c: int, listing: Iterable[Listed]) -> Mapping[int, Listed]:
    return {
        listed.number: listed
        for listed in listing
        if listed.folder is Folder.WAL and listed.number is not None and listed.number < c
    }


# --- pins
# What each snapshot keeps from being deleted.


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


# --- retention


@dataclass(frozen=True, slots=True)
class Pins:
    """What one active manifest keeps."""

    manifest_id: int
    wal_id_last_compacted: int | None
    sst_ids: bytes  # 16 bytes each
    loads: tuple[tuple[str, bytes], ...] = ()  # id of a pending load, and its SSTs
    origin_pins: frozenset[bytes] = frozenset()  # snapshots of other databases: `protocol.origins`

    @classmethod
    def of(cls, manifest: Manifest) -> Pins:
        """What this manifest keeps as long as it is active."""
        return cls(
            manifest.manifest_id,
            manifest.wal_id_last_compacted,
            manifest.leveled_ssts.ids,
            tuple((load.load_id, load.ssts.ids) for load in manifest.pending_loads),
            frozenset(needed_pins(manifest)),
        )

    @property
    def first_wal_id(self) -> int:
        """The WAL objects from here on are kept: c itself, too; all if nothing is compacted."""
        return self.wal_id_last_compacted or 0


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """What was last modified before these times, by the store's clock, is old enough to go."""

    cutoff_ms: int
    foreign_ms: int
    wal: WalRetention | None = None  # of what is compacted; None: none

    @classmethod
    def at(
        cls,
        now_ms: int,
        *,
        collect_age_s: int,
        foreign_age_s: int,
        wal_retention_s: int = 0,
        wal_retention_bytes: int = 0,
    ) -> Cutoffs:
        """The cutoffs at `now_ms`. Nothing goes that is younger than `collect_age_s`."""
        cutoff_ms = max(now_ms - 1_000 * collect_age_s, 0)
        foreign_ms = min(cutoff_ms, now_ms - 1_000 * foreign_age_s)
        if not wal_retention_s:
            return cls(cutoff_ms, foreign_ms)
        retention = WalRetention(now_ms - 1_000 * wal_retention_s, wal_retention_bytes)
        return cls(cutoff_ms, foreign_ms, retention)


@dataclass(frozen=True, slots=True)
class _WalKeeper:
    first: int  # this one and all after it stay
    verdict: RetentionVerdict


class Retention:
    """Judges the objects of one listing by a manifest that was current after it was taken."""

    def __init__(
        self,
        manifest: Manifest,
        pins: Iterable[Pins],
        cutoffs: Cutoffs,
        *,
        fences: Collection[str] = (),
        retained: int | None = None,
    ) -> None:
        """`pins` are those of all active manifests, `fences` the names of WAL objects that are.

        From `retained` on the WAL stays, whatever else lets it go (see `retained_from`).
        Raises `ValueError` when the pins of an active manifest are missing.
        """
        by_id = _by_id(manifest, pins)
        self._manifest_id = manifest.manifest_id
        self._leases = manifest.leases
        self._cutoffs = cutoffs
        # Only what is older than the manifest's own cutoff cannot be published without a lease.
        self._sst_cutoff_ms = min(cutoffs.cutoff_ms, manifest.gc_cutoff_ms)
        self._fences = frozenset(fences)
        self._manifests = _kept_manifests(manifest)
        self._ssts = _kept_ssts(manifest, by_id)
        self._wal = _wal_keepers(manifest, by_id)
        self._retained = retained

    def judge(self, listed: Listed) -> RetentionVerdict:
        """What becomes of this object."""
        if listed.is_foreign:
            is_old = listed.modified_ms < self._cutoffs.foreign_ms
            return RetentionVerdict(Reason.OLD_FOREIGN if is_old else Reason.YOUNG_FOREIGN)
        if listed.folder is Folder.MANIFEST:
            return self._judge_manifest(listed)
        return self._judge_wal(listed) if listed.folder is Folder.WAL else self._judge_sst(listed)

    def _judge_manifest(self, listed: Listed) -> RetentionVerdict:
        number = listed.number or 0
        kept = self._manifests.get(number)
        if kept is not None:
            return kept
        if number >= self._manifest_id:  # newer than the one that judges
            return RetentionVerdict(Reason.CURRENT, f"newer than manifest {self._manifest_id}")
        # No edit makes an inactive manifest active again, so the raised cutoff has no say here.
        return _unless_young(listed, self._cutoffs.cutoff_ms, Reason.INACTIVE)

    def _judge_wal(self, listed: Listed) -> RetentionVerdict:
        number = listed.number or 0
        for keeper in self._wal:
            if number >= keeper.first:
                return keeper.verdict
        if self._retained is not None and number >= self._retained:
            return RetentionVerdict(Reason.RETAINED)
        if listed.name in self._fences:
            return RetentionVerdict(Reason.FENCE, "keeps stalled writers out")
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


def active_ids(manifest: Manifest) -> frozenset[int]:
    """The ids of the manifests that are active when this one is current."""
    return frozenset((manifest.manifest_id, *(s.manifest_id for s in manifest.snapshots)))


def first_kept_wal_id(manifest: Manifest, pins: Iterable[Pins]) -> int:
    """The WAL objects before this one go, unless they are fences or too young.

    Arguments and errors are those of `Retention`.
    """
    return _wal_keepers(manifest, _by_id(manifest, pins))[-1].first


def snapshot_label(snapshot: Snapshot) -> str:
    """What operators call a snapshot: its name, or its id."""
    return snapshot.name or snapshot.id.hex()


def _by_id(manifest: Manifest, pins: Iterable[Pins]) -> dict[int, Pins]:
    by_id = {each.manifest_id: each for each in pins}
    missing = sorted(active_ids(manifest) - by_id.keys())
    if missing:
        raise ValueError(f"manifests {missing} are active, and what they keep is not known")
    return by_id


def _unless_young(listed: Listed, cutoff_ms: int, going: Reason) -> RetentionVerdict:
    if listed.modified_ms < cutoff_ms:
        return RetentionVerdict(going)
    moment = datetime.fromtimestamp(cutoff_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    return RetentionVerdict(Reason.YOUNG, f"the cutoff is {moment}")


def _pinned(manifest: Manifest, *, with_wal: bool = False) -> Iterator[tuple[int, str]]:
    """Manifests that snapshots name, and which snapshot it is; an id may come twice.

    `with_wal`: only by those that keep WAL objects, too.
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


def _kept_ssts(manifest: Manifest, by_id: dict[int, Pins]) -> dict[bytes, RetentionVerdict]:
    own = by_id[manifest.manifest_id]
    kept: dict[bytes, RetentionVerdict] = {}

    def keep(ids: bytes, verdict: RetentionVerdict) -> None:
        for sst_id in _ids(ids):
            kept.setdefault(sst_id, verdict)

    keep(own.sst_ids, RetentionVerdict(Reason.CURRENT, f"manifest {manifest.manifest_id}"))
    for load_id, ids in own.loads:
        keep(ids, RetentionVerdict(Reason.PENDING_LOAD, load_id))
    # Of the snapshots of one manifest, the first is told.
    for manifest_id, detail in dict(reversed([*_pinned(manifest)])).items():
        pins = by_id[manifest_id]
        verdict = RetentionVerdict(Reason.SNAPSHOT, detail)
        keep(pins.sst_ids, verdict)
        for _, ids in pins.loads:
            keep(ids, verdict)
    return kept


def _wal_keepers(manifest: Manifest, by_id: dict[int, Pins]) -> tuple[_WalKeeper, _WalKeeper]:
    """The current manifest, and whoever keeps the most."""
    own = by_id[manifest.manifest_id]
    current = _WalKeeper(own.first_wal_id, RetentionVerdict(Reason.NOT_BELOW_C, _c_of(own)))
    others = [current]
    for manifest_id, detail in _pinned(manifest, with_wal=True):
        pins = by_id[manifest_id]
        verdict = RetentionVerdict(Reason.NOT_BELOW_C, f"{_c_of(pins)}, snapshot {detail}")
        others.append(_WalKeeper(pins.first_wal_id, verdict))
    others += [
        _WalKeeper(lease.wal_id_min, RetentionVerdict(Reason.LEASE, lease.holder))
        for lease in manifest.leases
        if lease.wal_id_min is not None
    ]
    return current, min(others, key=lambda keeper: keeper.first)


def _c_of(pins: Pins) -> str:
    c = "none" if pins.wal_id_last_compacted is None else str(pins.wal_id_last_compacted)
    return f"c is {c} in manifest {pins.manifest_id}"


def _ids(packed: bytes) -> Iterator[bytes]:
    return (packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES))


# --- expiry
# Expiry: the edit of the manifest that comes before anything is deleted (rule F3).
#
# It drops the snapshots and leases whose time is over by the store's clock, so that whoever
# renews one or publishes under it finds it gone; and it raises the cutoff, which tells edits how
# old a new object of theirs must not be unless it is leased.


def is_lease_expired(lease: Lease, now_s: float) -> bool:
    """Whether the lease protects nothing any more at `now_s` of the store's clock."""
    return lease.expire_time_s != NEVER and lease.expire_time_s < now_s


def expire(
    manifest: Manifest, now_s: float, cutoff_ms: int, *, retained: int | None = None
) -> Manifest:
    """The manifest without what has expired at `now_s`, and with this cutoff or a later one.

    WAL objects from `retained` on stay, see `retain_wal`.
    """
    expired = replace(
        manifest,
        snapshots=tuple(s for s in manifest.snapshots if not is_expired(s, now_s)),
        leases=tuple(lease for lease in manifest.leases if not is_lease_expired(lease, now_s)),
        gc_cutoff_ms=max(manifest.gc_cutoff_ms, cutoff_ms),
    )
    return retain_wal(expired, retained)


def has_expired(
    manifest: Manifest, now_s: float, cutoff_ms: int, *, retained: int | None = None
) -> bool:
    """Whether the manifest contains the edit `expire` with these arguments (F2).

    Another collector's edit is as good as ours: what counts is what the manifest says.
    """
    return manifest == expire(manifest, now_s, cutoff_ms, retained=retained)


def is_edit_needed(current: Manifest, expired: Manifest, doomed: Iterable[Listed]) -> bool:
    """Whether `expired` must be published before `doomed` is deleted; they go if it is current.

    Not for SSTs that are older than the cutoff which is published already: no edit that has not
    seen it can succeed any more. And not for manifests, which no edit makes active again; each
    edit leaves one behind, and a collector must not go on for ever with what it left itself.
    """
    if (current.snapshots, current.leases) != (expired.snapshots, expired.leases):
        return True
    return any(
        listed.modified_ms >= current.gc_cutoff_ms
        for listed in doomed
        if listed.folder is not Folder.MANIFEST and not listed.is_foreign
    )
