"""Audit of a database: rules that its manifests, levels and WAL must satisfy. Pure.

All checks report their findings and go on, whereas `Version.of` stops at the first contradiction.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import attrgetter

from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, Manifest, upper_bound
from shalekv.protocol.sst_table import SstInfo

_NEVER_DOWN = (
    "writer_epoch",
    "compactor_epoch",
    "writer_first_seq",
    "last_compacted_seq",
    "gc_cutoff_ms",
    "loads_forgotten_ms",
    "logical_time_ms",
    "wal_generation",
    "wal_id_last_compacted",
    "wal_id_last_seen",
    "time_reset_wal_id",
)
_SET_BACK = ("loads_forgotten_ms", "logical_time_ms")  # when time_reset_wal_id goes up
_NEVER_CHANGED = ("database_id", "cas_mode")
_NONCES = (("writer_epoch", "writer_nonce"), ("compactor_epoch", "compactor_nonce"))


class FindingKind(enum.StrEnum):
    """The kind of a finding. The first ones are the errors of the format (`shalekv.errors`)."""

    BAD_MAGIC = "bad_magic"
    UNSUPPORTED_VERSION = "unsupported_version"
    TRUNCATED = "truncated"
    BAD_CHECKSUM = "bad_checksum"
    WRONG_OBJECT = "wrong_object"
    BAD_STRUCTURE = "bad_structure"
    MISSING = "missing"  # an object was written, and is not there
    UNREADABLE = "unreadable"  # the store does not return an object
    MANIFEST_FIELD = "manifest_field"  # fields of one manifest contradict each other
    MANIFEST_ORDER = "manifest_order"  # a field that never goes down went down (I5)
    SST_ROW = "sst_row"  # the manifest's row of an SST contradicts itself or the manifest
    SST_MISMATCH = "sst_mismatch"  # the SST is not as the manifest says
    LEVEL_OVERLAP = "level_overlap"  # two SSTs of one sorted run overlap
    LEVEL_SEQUENCE = "level_sequence"  # sources that overlap are not ordered by sequence number
    LEVEL_SECTION = "level_section"  # entries that do not belong in this level
    REPEATED_KEY = "repeated_key"  # two versions of a key in one SST of the levels
    STALE_VERSION = "stale_version"  # a version above an equal or newer one
    WAL_SEQUENCE = "wal_sequence"  # slot order is not sequence order (I4)
    WAL_EPOCH = "wal_epoch"  # a slot of a writer that cannot have written it (I3)
    WAL_BOUNDARY = "wal_boundary"  # a slot is on the other side of c than its sequence numbers
    LOAD = "load"  # a load is committed, and its files are not protected
    ORIGIN = "origin"  # another database does not keep the SSTs that both share
    SNAPSHOT_CHECKSUM = "snapshot_checksum"  # the manifest is not the one that a snapshot names
    POLICY = "access_policy"  # a version of the access policy is missing
    CLONE_PIN = "clone_pin"  # SSTs are kept for a clone that is gone, or cannot be found
    ORPHAN = "orphan"  # nothing names or protects an object; the collector will delete it

    @property
    def is_damage(self) -> bool:
        """Return whether something is wrong with the database."""
        harmless = (FindingKind.ORPHAN, FindingKind.CLONE_PIN, FindingKind.UNREADABLE)
        return self not in harmless


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding: the object `name`, the problem, and the offset of the byte if it is known."""

    name: str
    kind: FindingKind
    problem: str
    offset: int | None = None


def manifest_findings(name: str, manifest: Manifest) -> Iterator[Finding]:
    """Iterate over the contradictions in one manifest, except in its table of SSTs."""
    for problem in _manifest_contradictions(manifest):
        yield Finding(name, FindingKind.MANIFEST_FIELD, problem)


def _manifest_contradictions(manifest: Manifest) -> Iterator[str]:
    if manifest.wal_id_last_compacted is None and manifest.leveled_ssts.count:
        yield "nothing is compacted (wal_id_last_compacted), and yet there are SSTs in the levels"
    if not 1 <= manifest.max_parallel_writes <= manifest.fence_width:
        yield (
            f"fence_width is {manifest.fence_width} and max_parallel_writes "
            f"{manifest.max_parallel_writes}: expected 1 or more, and as many fences as writes"
        )
    yield from _repeated("snapshots", (snapshot.id.hex() for snapshot in manifest.snapshots))
    yield from _repeated("snapshots", (s.name for s in manifest.snapshots if s.name))
    yield from _repeated("leases", (lease.id.hex() for lease in manifest.leases))
    yield from _repeated("pending_loads", (load.load_id for load in manifest.pending_loads))
    yield from _repeated("recent_loads", (load.load_id for load in manifest.recent_loads))
    for snapshot in manifest.snapshots:
        if snapshot.manifest_id > manifest.manifest_id:
            yield (
                f"snapshot {snapshot.id.hex()} is of manifest {snapshot.manifest_id}, which comes "
                "after this one"
            )


def _repeated(field: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{field}: {name} is listed {count} times"


def succession_findings(name: str, older: Manifest, newer: Manifest) -> Iterator[Finding]:
    """Iterate over fields of `newer`, the object `name`, that cannot follow `older` (I5)."""
    before = f"than in manifest {older.manifest_id}"
    for field in _NEVER_CHANGED:
        if getattr(older, field) != getattr(newer, field):
            problem = f"{field} is another one {before}: it never changes"
            yield Finding(name, FindingKind.MANIFEST_ORDER, problem)
    for field in _NEVER_DOWN:
        old, new = getattr(older, field), getattr(newer, field)
        is_set_back = field in _SET_BACK and older.time_reset_wal_id != newer.time_reset_wal_id
        if old is not None and (new is None or new < old) and not is_set_back:
            problem = f"{field} is {new}, lower {before}, where it is {old}"
            yield Finding(name, FindingKind.MANIFEST_ORDER, problem)
    for epoch, nonce in _NONCES:
        is_same = getattr(older, epoch) == getattr(newer, epoch)
        if is_same and getattr(older, nonce) != getattr(newer, nonce):
            problem = f"{nonce} is another one {before}, and {epoch} is the same"
            yield Finding(name, FindingKind.MANIFEST_ORDER, problem)


def level_findings(name: str, manifest: Manifest) -> Iterator[Finding]:
    """Iterate over the findings in the levels of the manifest, which is the object `name`."""
    by_level: dict[int, list[SstInfo]] = {}
    ids: set[bytes] = set()
    for info in manifest.leveled_ssts:
        by_level.setdefault(info.level, []).append(info)
        if info.id in ids:
            yield Finding(name, FindingKind.SST_ROW, f"SST {info.id.hex()} is listed twice")
        ids.add(info.id)
        for problem in _contradictions(info, manifest):
            yield Finding(name, FindingKind.SST_ROW, f"SST {info.id.hex()}: {problem}")
    for level, ssts in sorted(by_level.items()):
        if level not in (L0, SYSTEM_LEVEL):
            yield from _overlaps(name, level, ssts)
    yield from _shared_numbers(name, by_level.get(L0, ()))


def _contradictions(info: SstInfo, manifest: Manifest) -> Iterator[str]:
    """Iterate over the problems of one row of the table."""
    if info.level > SYSTEM_LEVEL:
        yield f"there is no level {info.level}"
    if info.last_key and info.first_key > info.last_key:
        yield "its first key is above its last key"
    if info.min_seq > info.max_seq:
        yield f"its sequence numbers go from {info.min_seq} to {info.max_seq}"
    if info.max_seq > manifest.last_compacted_seq:
        yield (
            f"its sequence numbers reach {info.max_seq}, and last_compacted_seq is "
            f"{manifest.last_compacted_seq}"
        )
    if info.tombstone_count > info.entry_count:
        yield f"{info.tombstone_count} of its {info.entry_count} entries are tombstones"
    if info.entry_count == 0:
        yield "it has no entries"
    ends = (info.filter_offset + info.filter_len, info.block_meta_offset + info.block_meta_len)
    if ends[0] > info.block_meta_offset or ends[1] > info.size_bytes:
        yield f"its parts do not fit an object of {info.size_bytes} bytes"


def _overlaps(name: str, level: int, ssts: Sequence[SstInfo]) -> Iterator[Finding]:
    """Find overlaps by the rule of `SortedRun.of`: neighbours may share a bound, and no key."""
    for before, after in pairwise(sorted(ssts, key=attrgetter("first_key"))):
        if _overlap(before, after):
            problem = f"level {level}: SSTs {before.id.hex()} and {after.id.hex()} overlap"
            yield Finding(name, FindingKind.LEVEL_OVERLAP, problem)


def _shared_numbers(name: str, ssts: Sequence[SstInfo]) -> Iterator[Finding]:
    """Find pairs of L0 that overlap both in keys and in sequence numbers: neither is newer."""
    ordered = sorted(ssts, key=lambda info: info.min_seq)
    reach = 0
    is_disjoint = True
    for info in ordered:
        is_disjoint = is_disjoint and info.min_seq > reach
        reach = max(reach, info.max_seq)
    if is_disjoint:
        return  # the normal case; pairs are compared only to name them
    for one, other in combinations(ordered, 2):
        if _overlap(one, other) and other.min_seq <= one.max_seq:
            problem = (
                f"level 0: SSTs {one.id.hex()} and {other.id.hex()} overlap, and so do their "
                "sequence numbers: neither is the newer one"
            )
            yield Finding(name, FindingKind.LEVEL_SEQUENCE, problem)


def _overlap(one: SstInfo, other: SstInfo) -> bool:
    """Return whether two SSTs share more than a bound."""
    low, high = sorted((one, other), key=attrgetter("first_key"))
    return upper_bound(low) > high.first_key or low.first_key == high.first_key


@dataclass(frozen=True, slots=True)
class AuditedSlot:
    """The slot of a WAL object, and the fields of its footer that are compared between slots."""

    wal_id: int
    epoch: int
    nonce: bytes
    min_seq: int
    max_seq: int
    is_fence: bool


class LogAudit:
    """Checks the rules of the WAL (I3, I4), given its slots in their order.

    Epochs of *data* never go down. Fences of an older epoch may follow data of a newer one: a slow
    opener created them, and they have no effect. Data of an older epoch may follow a newer fence as
    long as the run of fences was not complete, that is before any newer data.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Begin an audit. `manifest` was current when the slots were read, or before."""
        self._compacted_seq = manifest.last_compacted_seq
        self._first_uncompacted = manifest.first_uncompacted_wal_id
        self._last_seq = 0
        self._data_epoch = 0
        self._nonces: dict[int, bytes] = {manifest.writer_epoch: manifest.writer_nonce}

    def see(self, name: str, slot: AuditedSlot) -> Iterator[Finding]:
        """Iterate over the findings of the next slot, which is the object `name`."""
        known = self._nonces.setdefault(slot.epoch, slot.nonce)
        if known != slot.nonce:
            problem = f"two writers have the epoch {slot.epoch}: an epoch has one winner"
            yield Finding(name, FindingKind.WAL_EPOCH, problem)
        if slot.is_fence:
            return
        if slot.epoch < self._data_epoch:
            problem = f"data of epoch {slot.epoch} follows data of epoch {self._data_epoch}"
            yield Finding(name, FindingKind.WAL_EPOCH, problem)
        self._data_epoch = max(self._data_epoch, slot.epoch)
        if slot.min_seq <= self._last_seq:
            problem = f"begins with {slot.min_seq}, but a slot before it holds {self._last_seq}"
            yield Finding(name, FindingKind.WAL_SEQUENCE, problem)
        self._last_seq = max(self._last_seq, slot.max_seq)
        is_compacted = slot.wal_id < self._first_uncompacted
        if is_compacted and slot.max_seq > self._compacted_seq:
            problem = f"is compacted and holds {slot.max_seq}, above {self._compacted_seq}"
            yield Finding(name, FindingKind.WAL_BOUNDARY, problem)
        if not is_compacted and slot.min_seq <= self._compacted_seq:
            problem = f"is not compacted and holds {slot.min_seq}, not above {self._compacted_seq}"
            yield Finding(name, FindingKind.WAL_BOUNDARY, problem)


def future_epoch(name: str, slot: AuditedSlot, manifest: Manifest) -> Iterator[Finding]:
    """Find a slot of an epoch that no writer had won. REQUIRES: `manifest` was read after it."""
    if slot.epoch > manifest.writer_epoch:
        problem = f"is of epoch {slot.epoch}; the manifest knows {manifest.writer_epoch} at most"
        yield Finding(name, FindingKind.WAL_EPOCH, problem)


def missing_slots(
    filled: frozenset[int],
    *,
    first: int,
    width: int | None,
    last_filled: int | None,
    left_out: Iterable[range] = (),
) -> list[range]:
    """Return the slots from `first` on that were filled once and are not any more.

    `last_filled` is a slot that was certainly filled, such as c or the last one seen. A slot that
    is `width` or more below a filled one was filled as well, since no writer has more than that
    many in flight; None: a filled slot proves nothing of those below (`Manifest.upload_window`).
    Slots in `left_out` were never filled.
    """
    known = -1 if last_filled is None else last_filled
    proven = -1 if width is None else max(filled, default=-1) - width
    end = max(known, proven) + 1
    taken = [range(wal_id, wal_id + 1) for wal_id in filled]
    missing: list[range] = []
    for each in sorted([*taken, *left_out], key=attrgetter("start", "stop")):
        if first < min(each.start, end):
            missing.append(range(first, min(each.start, end)))
        first = max(first, each.stop)
    return [*missing, range(first, end)] if first < end else missing
