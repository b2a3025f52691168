"""The manifest as a value: the state of the database at a point in time.

Field names are those of the design document (seed 000, "Structure"); `protos/shalekv/v1/
manifest.proto` documents each of them. Edits are functions from manifest to manifest and live
beside the rules that they serve (`protocol.opening`, later compaction and snapshots).
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

from shalekv.protocol.entry import END_OF_KEYS, KeyRange
from shalekv.protocol.sst_table import SstInfo, SstTable

MANIFEST_FORMAT_VERSION = 1
NO_NONCE = bytes(16)


class CasMode(enum.Enum):
    """How an object is created only if it does not exist."""

    NATIVE = 1
    TWO_PHASE = 2


class WalMode(enum.Enum):
    """Where a write is made durable."""

    OBJECT_STORE = 1
    QUORUM = 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The promise that the objects of one manifest stay readable."""

    id: bytes
    manifest_id: int
    snapshot_expire_time_s: int  # by the store's clock; 0: never
    name: str = ""
    manifest_checksum: int = 0
    created_ms: int = 0  # by the store's clock; 0: it is read as of its last commit
    ssts_only: bool = False  # it keeps no WAL object, and cannot be read


@dataclass(frozen=True, slots=True)
class Origin:
    """Another database, some of whose SSTs are read by this one: see `protocol.origins`."""

    database_id: bytes  # that wrote them, as they say themselves
    url: str  # where they are; empty: in the levels folder of this database
    snapshot_id: bytes  # in the manifest there, which keeps them; empty where the URL is
    sst_ids: bytes  # 16 bytes each; empty: none is read any more


@dataclass(frozen=True, slots=True)
class Lease:
    """Protects objects that a job writes before a manifest names them."""

    id: bytes
    expire_time_s: int
    holder: str
    wal_id_min: int | None = None
    reserved_seq: int | None = None  # SSTs with entries up to here are merged by its holder alone


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load whose files are pinned until a WAL record commits it."""

    load_id: str
    ssts: SstTable


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """A load that was committed."""

    load_id: str
    seq: int
    logical_time_ms: int = 0  # of the WAL object that commits it


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of the manifest. c of the protocol is `wal_id_last_compacted`."""

    database_id: bytes
    manifest_id: int
    write_id: bytes
    cas_mode: CasMode = CasMode.NATIVE
    wal_mode: WalMode = WalMode.OBJECT_STORE
    wal_generation: int = 0
    wal_members: tuple[str, ...] = ()  # safekeepers: see `protocol.membership`
    wal_members_next: tuple[str, ...] = ()  # while a change of members is under way
    wal_ids_left_out: tuple[range, ...] = ()  # by switches to safekeepers, the lowest first
    writer_epoch: int = 0
    writer_nonce: bytes = NO_NONCE
    writer_address: str = ""
    writer_first_seq: int = 0  # 0: no writer has served yet
    compactor_epoch: int = 0
    compactor_nonce: bytes = NO_NONCE
    wal_id_last_compacted: int | None = None
    wal_id_last_seen: int | None = None
    last_compacted_seq: int = 0
    max_parallel_writes: int = 1
    fence_width: int = 1
    gc_cutoff_ms: int = 0
    logical_time_ms: int = 0
    time_reset_wal_id: int | None = None  # WAL objects up to here prove no logical time
    leveled_ssts: SstTable = field(default_factory=SstTable)
    snapshots: tuple[Snapshot, ...] = ()
    leases: tuple[Lease, ...] = ()
    pending_loads: tuple[PendingLoad, ...] = ()
    recent_loads: tuple[RecentLoad, ...] = ()
    loads_forgotten_ms: int = 0  # logical time of the latest load that is not remembered
    origins: tuple[Origin, ...] = ()

    @property
    def first_uncompacted_wal_id(self) -> int:
        """Where replay begins: the slot after c, or 0."""
        return 0 if self.wal_id_last_compacted is None else self.wal_id_last_compacted + 1


# --- tree
# The tree: the SSTs that one manifest names, in the order in which they are read.
#
# L0 holds SSTs that may overlap, the newest first. Each level below is one sorted run: its SSTs
# do not overlap. For every key, what stands in a source is newer than all of it in the sources
# after it (I9 rests on this). Idempotency records have a level of their own, apart from all keys.


L0 = 0
SYSTEM_LEVEL = 63  # idempotency records, which have keys of another space; newest first, as L0


def upper_bound(info: SstInfo) -> bytes:
    """The last key of the SST's range; `END_OF_KEYS` if it has no bound."""
    return info.last_key or END_OF_KEYS


def overlaps(info: SstInfo, keys: KeyRange) -> bool:
    """Whether the SST's range, both ends included, has a key of `keys`."""
    return upper_bound(info) >= keys.start and (not keys.end or info.first_key < keys.end)


def newest_first(ssts: Iterable[SstInfo]) -> list[SstInfo]:
    """The SSTs of L0, or of the system, in the order in which they are read."""
    return sorted(ssts, key=attrgetter("max_seq"), reverse=True)


@dataclass(frozen=True, slots=True)
class SortedRun:
    """The SSTs of one level below L0, by key."""

    level: int
    ssts: Sequence[SstInfo]
    first_keys: Sequence[bytes]

    @classmethod
    def of(cls, level: int, ssts: Sequence[SstInfo]) -> SortedRun:
        """The run of these SSTs, in any order. `ValueError`: two of them overlap."""
        ordered = sorted(ssts, key=attrgetter("first_key"))
        for before, after in pairwise(ordered):
            # The end of a range tombstone counts as a key of its SST, and is not deleted: two
            # neighbours may share it.
            if upper_bound(before) > after.first_key or before.first_key == after.first_key:
                ids = f"{before.id.hex()} and {after.id.hex()}"
                raise ValueError(f"level {level}: the SSTs {ids} overlap")
        return cls(level, ordered, [info.first_key for info in ordered])

    @property
    def size_bytes(self) -> int:
        """Of all its objects."""
        return sum(info.size_bytes for info in self.ssts)

    def find(self, key: bytes) -> SstInfo | None:
        """The one SST that can hold `key`, or a range tombstone over it."""
        at = bisect_right(self.first_keys, key) - 1
        if at < 0 or upper_bound(self.ssts[at]) < key:
            return None
        return self.ssts[at]

    def overlapping(self, keys: KeyRange) -> Sequence[SstInfo]:
        """Those that can hold a key of `keys`, by key."""
        low = max(bisect_right(self.first_keys, keys.start) - 1, 0)
        high = bisect_left(self.first_keys, keys.end) if keys.end else len(self.ssts)
        if low < high and upper_bound(self.ssts[low]) < keys.start:
            low += 1
        return self.ssts[low:high]


@dataclass(frozen=True, slots=True)
class Version:
    """The levels of one manifest: exactly the effect of the WAL slots up to `wal_id`."""

    manifest_id: int
    wal_id: int | None  # c of the protocol; None: nothing is compacted
    last_seq: int
    l0: Sequence[SstInfo]  # newest first
    runs: Sequence[SortedRun]  # L1 and below, those that hold something
    system: Sequence[SstInfo]  # newest first

    @classmethod
    def of(cls, manifest: Manifest) -> Version:
        """The tree of a manifest. `ValueError`: its levels contradict each other."""
        by_level: dict[int, list[SstInfo]] = {}
        for info in manifest.leveled_ssts:
            by_level.setdefault(info.level, []).append(info)
        unsorted = {level: by_level.pop(level, ()) for level in (L0, SYSTEM_LEVEL)}
        return cls(
            manifest_id=manifest.manifest_id,
            wal_id=manifest.wal_id_last_compacted,
            last_seq=manifest.last_compacted_seq,
            l0=newest_first(unsorted[L0]),
            runs=[SortedRun.of(level, by_level[level]) for level in sorted(by_level)],
            system=newest_first(unsorted[SYSTEM_LEVEL]),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no key of clients can be in it."""
        return not self.l0 and not self.runs

    def sources_of(self, key: bytes) -> Iterator[SstInfo]:
        """The SSTs that can hold `key`, or a range tombstone over it, from newest to oldest."""
        for info in self.l0:
            if info.first_key <= key <= upper_bound(info):
                yield info
        for run in self.runs:
            found = run.find(key)
            if found is not None:
                yield found


# --- level_sizes
# What the levels of a manifest weigh, and what that means for space and reads.


@dataclass(frozen=True, slots=True)
class LevelSize:
    """One level. `entries` count tombstones, `tombstones` range tombstones too."""

    level: int
    ssts: int
    size_bytes: int
    entries: int
    tombstones: int


def level_sizes(table: SstTable) -> list[LevelSize]:
    """The levels that hold something, by number; 100,000 SSTs take some 20 ms."""
    sums: dict[int, list[int]] = {}
    columns = (table.sizes_bytes, table.entry_counts, table.tombstone_counts)
    numbers = (struct.unpack(f"<{table.count}Q", column) for column in columns)
    for level, size_bytes, entries, tombstones in zip(table.levels, *numbers, strict=True):
        found = sums.get(level)
        if found is None:
            found = sums[level] = [0, 0, 0, 0]
        found[0] += 1
        found[1] += size_bytes
        found[2] += entries
        found[3] += tombstones
    return [LevelSize(level, *sums[level]) for level in sorted(sums)]


def total_bytes(sizes: Iterable[LevelSize]) -> int:
    """Of all these levels."""
    return sum(size.size_bytes for size in sizes)


def space_amplification(sizes: Sequence[LevelSize]) -> float:
    """Bytes of all data for one byte of the lowest level that has some; 0: there is no data.

    The lowest level holds each key once, so that what stands above it is at most as much again as
    what was overwritten. While all data is in L0 this says nothing, and is 1.
    """
    data = [size for size in sizes if size.level != SYSTEM_LEVEL]
    runs = [size for size in data if size.level != L0]
    if not runs:
        return 1.0 if data else 0.0
    return total_bytes(data) / runs[-1].size_bytes


def read_amplification(sizes: Iterable[LevelSize]) -> int:
    """The most SSTs that a read of one key looks into, filters left aside."""
    return sum(size.ssts if size.level == L0 else 1 for size in sizes if size.level != SYSTEM_LEVEL)


def most_over_one_key(ssts: Collection[SstInfo]) -> int:
    """How many of these SSTs overlap at the key where most of them do."""
    opening = sorted(info.first_key for info in ssts)
    closing = sorted(upper_bound(info) for info in ssts)
    most = 0
    closed = 0
    for opened, key in enumerate(opening, 1):
        while closing[closed] < key:
            closed += 1
        most = max(most, opened - closed)
    return most
