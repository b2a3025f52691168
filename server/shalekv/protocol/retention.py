"""Retention: which objects must stay, and for whom; everything else may go (I8).

The rules are those of seed 000, "Garbage Collectors", and F1 and F3 of the protocol. The listing is
older than the manifest that judges it. So whatever an edit makes reachable from then on is not in
the listing, or protected by a lease that this manifest still has, or last modified at its
`gc_cutoff_ms` or later: nothing that may go is ever needed again, however late it is deleted.

What makes a manifest active is that a snapshot in the judging manifest names it. Whether that has
expired is not asked here: `shalekv.core.expiry` takes it out of the manifest before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from shalekv.core.collectable import Folder, Listed, Reason, Verdict
from shalekv.core.wal_retention import WalRetention
from shalekv.protocol.lease import protects
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.origins import needed_pins
from shalekv.protocol.sst_table import ID_BYTES


@dataclass(frozen=True, slots=True)
class Pins:
    """What one active manifest keeps."""

    manifest_id: int
    wal_id_last_compacted: int | None
    sst_ids: bytes  # 16 bytes each
    loads: tuple[tuple[str, bytes], ...] = ()  # id of a pending load, and its SSTs
    origin_pins: frozenset[bytes] = frozenset()  # snapshots of other databases: `core.origins`

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
    verdict: Verdict


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

    def judge(self, listed: Listed) -> Verdict:
        """What becomes of this object."""
        if listed.is_foreign:
            is_old = listed.modified_ms < self._cutoffs.foreign_ms
            return Verdict(Reason.OLD_FOREIGN if is_old else Reason.YOUNG_FOREIGN)
        if listed.folder is Folder.MANIFEST:
            return self._judge_manifest(listed)
        return self._judge_wal(listed) if listed.folder is Folder.WAL else self._judge_sst(listed)

    def _judge_manifest(self, listed: Listed) -> Verdict:
        number = listed.number or 0
        kept = self._manifests.get(number)
        if kept is not None:
            return kept
        if number >= self._manifest_id:  # newer than the one that judges
            return Verdict(Reason.CURRENT, f"newer than manifest {self._manifest_id}")
        # No edit makes an inactive manifest active again, so the raised cutoff has no say here.
        return _unless_young(listed, self._cutoffs.cutoff_ms, Reason.INACTIVE)

    def _judge_wal(self, listed: Listed) -> Verdict:
        number = listed.number or 0
        for keeper in self._wal:
            if number >= keeper.first:
                return keeper.verdict
        if self._retained is not None and number >= self._retained:
            return Verdict(Reason.RETAINED)
        if listed.name in self._fences:
            return Verdict(Reason.FENCE, "keeps stalled writers out")
        return _unless_young(listed, self._sst_cutoff_ms, Reason.BELOW_C)

    def _judge_sst(self, listed: Listed) -> Verdict:
        sst_id = listed.sst_id or b""
        kept = self._ssts.get(sst_id)
        if kept is not None:
            return kept
        for lease in self._leases:
            if protects(lease.id, sst_id):
                return Verdict(Reason.LEASE, lease.holder)
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


def _unless_young(listed: Listed, cutoff_ms: int, going: Reason) -> Verdict:
    if listed.modified_ms < cutoff_ms:
        return Verdict(going)
    moment = datetime.fromtimestamp(cutoff_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    return Verdict(Reason.YOUNG, f"the cutoff is {moment}")


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


def _kept_manifests(manifest: Manifest) -> dict[int, Verdict]:
    kept = {manifest.manifest_id: Verdict(Reason.CURRENT)}
    for manifest_id, detail in _pinned(manifest):
        kept.setdefault(manifest_id, Verdict(Reason.SNAPSHOT, detail))
    return kept


def _kept_ssts(manifest: Manifest, by_id: dict[int, Pins]) -> dict[bytes, Verdict]:
    own = by_id[manifest.manifest_id]
    kept: dict[bytes, Verdict] = {}

    def keep(ids: bytes, verdict: Verdict) -> None:
        for sst_id in _ids(ids):
            kept.setdefault(sst_id, verdict)

    keep(own.sst_ids, Verdict(Reason.CURRENT, f"manifest {manifest.manifest_id}"))
    for load_id, ids in own.loads:
        keep(ids, Verdict(Reason.PENDING_LOAD, load_id))
    # Of the snapshots of one manifest, the first is told.
    for manifest_id, detail in dict(reversed([*_pinned(manifest)])).items():
        pins = by_id[manifest_id]
        verdict = Verdict(Reason.SNAPSHOT, detail)
        keep(pins.sst_ids, verdict)
        for _, ids in pins.loads:
            keep(ids, verdict)
    return kept


def _wal_keepers(manifest: Manifest, by_id: dict[int, Pins]) -> tuple[_WalKeeper, _WalKeeper]:
    """The current manifest, and whoever keeps the most."""
    own = by_id[manifest.manifest_id]
    current = _WalKeeper(own.first_wal_id, Verdict(Reason.NOT_BELOW_C, _c_of(own)))
    others = [current]
    for manifest_id, detail in _pinned(manifest, with_wal=True):
        pins = by_id[manifest_id]
        verdict = Verdict(Reason.NOT_BELOW_C, f"{_c_of(pins)}, snapshot {detail}")
        others.append(_WalKeeper(pins.first_wal_id, verdict))
    others += [
        _WalKeeper(lease.wal_id_min, Verdict(Reason.LEASE, lease.holder))
        for lease in manifest.leases
        if lease.wal_id_min is not None
    ]
    return current, min(others, key=lambda keeper: keeper.first)


def _c_of(pins: Pins) -> str:
    c = "none" if pins.wal_id_last_compacted is None else str(pins.wal_id_last_compacted)
    return f"c is {c} in manifest {pins.manifest_id}"


def _ids(packed: bytes) -> Iterator[bytes]:
    return (packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES))
