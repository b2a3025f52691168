"""The manifest as a value: the state of the database at a point in time, and its levels.

`protos/shalekv/v1/manifest.proto` documents each field. Edits are functions from manifest to
manifest. They are in the modules of the rules that they implement, such as `protocol.opening`,
`protocol.snapshot` and `protocol.compaction.publish`.

A `Version` has the SSTs that one manifest names, in the order in which they are read. L0 holds SSTs
that may overlap, the newest first. Each level below it is one sorted run, whose SSTs do not
overlap. For every key, the entries in one source are newer than all entries in the sources after it
(I9 depends on this). Idempotency records have a level of their own, apart from all keys.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

from shalekv.protocol.entry import END_OF_KEYS, KeyRange
from shalekv.protocol.sst_table import SstInfo, SstTable

MANIFEST_FORMAT_VERSION = 1
NO_NONCE = bytes(16)
L0 = 0
SYSTEM_LEVEL = 63  # of idempotency records, in a key space of their own; newest first, as L0


class CasMode(enum.Enum):
    """The way in which an object is created only if it does not exist."""

    NATIVE = 1
    TWO_PHASE = 2


class WalMode(enum.Enum):
    """The place where a write is made durable."""

    OBJECT_STORE = 1
    QUORUM = 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A promise that the objects of one manifest stay readable until an expiry time."""

    id: bytes
    manifest_id: int
    snapshot_expire_time_s: int  # by the store's clock; 0: never
    name: str = ""
    manifest_checksum: int = 0
    created_ms: int = 0  # logical time as of which it is read; 0: that of its last commit
    ssts_only: bool = False  # it keeps no WAL object, so it cannot be read


@dataclass(frozen=True, slots=True)
class Origin:
    """Another database, some SSTs of which this one reads: see `protocol.origins`."""

    database_id: bytes  # the database that wrote the SSTs, as their footers say
    url: str  # the database that has them; empty: they are in the levels folder of this one
    snapshot_id: bytes  # the snapshot in that database that keeps them; empty if `url` is
    sst_ids: bytes  # 16 bytes each; empty: none is read any more


@dataclass(frozen=True, slots=True)
class Lease:
    """A protection of the objects of a job, or of WAL objects: see `protocol.lease`."""

    id: bytes
    expire_time_s: int  # by the store's clock; 0: never
    holder: str
    wal_id_min: int | None = None  # the first WAL object that it keeps; None: it is of a job
    reserved_seq: int | None = None  # only its holder merges SSTs with entries up to here


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load whose files are kept until a WAL record that commits it is compacted."""

    load_id: str
    ssts: SstTable


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """A committed load, remembered so that it is not applied again."""

    load_id: str
    seq: int
    logical_time_ms: int = 0  # of the WAL object that commits it


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One manifest of a database: each edit creates the next one, with `manifest_id` + 1.

    The rules and server/docs/protocol.md call `wal_id_last_compacted` *c*.
    """

    database_id: bytes
    manifest_id: int
    write_id: bytes
    cas_mode: CasMode = CasMode.NATIVE
    wal_mode: WalMode = WalMode.OBJECT_STORE
    wal_generation: int = 0  # goes up with each edit of the members
    wal_members: tuple[str, ...] = ()  # safekeepers: see `protocol.membership`
    wal_members_next: tuple[str, ...] = ()  # while a change of members is under way
    wal_ids_left_out: tuple[range, ...] = ()  # left out by switches to safekeepers, ascending
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
    fence_width: int = 1  # slots in a row that an opener must fence
    gc_cutoff_ms: int = 0
    logical_time_ms: int = 0
    time_reset_wal_id: int | None = None  # logical times in WAL objects up to here do not count
    leveled_ssts: SstTable = field(default_factory=SstTable)
    snapshots: tuple[Snapshot, ...] = ()
    leases: tuple[Lease, ...] = ()
    pending_loads: tuple[PendingLoad, ...] = ()
    recent_loads: tuple[RecentLoad, ...] = ()
    loads_forgotten_ms: int = 0  # logical time of the latest load that was forgotten; 0: none
    origins: tuple[Origin, ...] = ()
    is_dropped: bool = False  # the database is being deleted: nothing opens it any more

    @property
    def is_log_in_store(self) -> bool:
        """Return whether the WAL objects are the whole log.

        With safekeepers they are its archive, which may lack the newest records.
        """
        return self.wal_mode is WalMode.OBJECT_STORE

    @property
    def upload_window(self) -> int | None:
        """Maximum number of empty slots before a filled one; None: the manifest does not know.

        Writers have at most `fence_width` objects in flight. A safekeeper that archives several
        objects at once may die, and then a slot stays empty until another one goes on.
        """
        return self.fence_width if self.is_log_in_store else None

    @property
    def first_uncompacted_wal_id(self) -> int:
        """The slot at which replay begins: the one after c, or 0 if nothing is compacted."""
        return 0 if self.wal_id_last_compacted is None else self.wal_id_last_compacted + 1


def upper_bound(info: SstInfo) -> bytes:
    """Return the last key of the SST's range; `END_OF_KEYS` if it has no bound."""
    return info.last_key or END_OF_KEYS


def overlaps(info: SstInfo, keys: KeyRange) -> bool:
    """Return whether the SST's range, both ends included, contains a key of `keys`."""
    return upper_bound(info) >= keys.start and (not keys.end or info.first_key < keys.end)


def newest_first(ssts: Iterable[SstInfo]) -> list[SstInfo]:
    """Sort the SSTs of L0, or of the system level, in the order in which they are read."""
    return sorted(ssts, key=attrgetter("max_seq"), reverse=True)


@dataclass(frozen=True, slots=True)
class SortedRun:
    """The SSTs of one level below L0, in the order of their keys."""

    level: int
    ssts: Sequence[SstInfo]
    first_keys: Sequence[bytes]

    @classmethod
    def of(cls, level: int, ssts: Sequence[SstInfo]) -> SortedRun:
        """Return the run of these SSTs, given in any order. Raises `ValueError` if two overlap."""
        ordered = sorted(ssts, key=attrgetter("first_key"))
        for before, after in pairwise(ordered):
            # The end of a range tombstone counts as a key of its SST although it is not deleted,
            # so two neighbours may share it.
            if upper_bound(before) > after.first_key or before.first_key == after.first_key:
                ids = f"{before.id.hex()} and {after.id.hex()}"
                raise ValueError(f"level {level}: the SSTs {ids} overlap")
        return cls(level, ordered, [info.first_key for info in ordered])

    @property
    def size_bytes(self) -> int:
        """The size of all SSTs of the run."""
        return sum(info.size_bytes for info in self.ssts)

    def overlapping(self, keys: KeyRange) -> Sequence[SstInfo]:
        """Return the SSTs that can hold a key of `keys`, in the order of their keys."""
        low = max(bisect_right(self.first_keys, keys.start) - 1, 0)
        high = bisect_left(self.first_keys, keys.end) if keys.end else len(self.ssts)
        if low < high and upper_bound(self.ssts[low]) < keys.start:
            low += 1
        return self.ssts[low:high]


@dataclass(frozen=True, slots=True)
class Version:
    """The levels of one manifest. They have exactly the effect of the WAL slots up to `wal_id`."""

    manifest_id: int
    wal_id: int | None  # c; None: nothing is compacted
    last_seq: int
    l0: Sequence[SstInfo]  # newest first
    runs: Sequence[SortedRun]  # the levels below L0 that are not empty, the highest first
    system: Sequence[SstInfo]  # SSTs of idempotency records (`SYSTEM_LEVEL`), newest first

    @classmethod
    def of(cls, manifest: Manifest) -> Version:
        """Return the version of a manifest. Raises `ValueError` if SSTs of one level overlap."""
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
        """Return whether the levels hold no user key."""
        return not self.l0 and not self.runs

    def sources_of(self, key: bytes) -> list[SstInfo]:
        """Return the SSTs that can hold `key` or a range tombstone over it, newest first."""
        # Bounds are those of `upper_bound`: each get from the levels comes here.
        end = END_OF_KEYS
        found = [each for each in self.l0 if each.first_key <= key <= (each.last_key or end)]
        for run in self.runs:
            at = bisect_right(run.first_keys, key) - 1
            if at >= 0:
                info = run.ssts[at]
                if key <= (info.last_key or end):
                    found.append(info)
        return found


@dataclass(frozen=True, slots=True)
class LevelSize:
    """Totals of one level. `entries` includes tombstones, and `tombstones` range tombstones."""

    level: int
    ssts: int
    size_bytes: int
    entries: int
    tombstones: int


def level_sizes(table: SstTable) -> list[LevelSize]:
    """Return the totals of the non-empty levels, by number. Takes 20 ms for 100,000 SSTs."""
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
    """Return the size of all these levels."""
    return sum(size.size_bytes for size in sizes)


def space_amplification(sizes: Sequence[LevelSize]) -> float:
    """Return the bytes of all data per byte of the lowest non-empty level; 0 if there is no data.

    The lowest level holds each key once, so the levels above it bound the overwritten and deleted
    data. While all data is in L0 the ratio is not known, and 1 is returned.
    """
    data = [size for size in sizes if size.level != SYSTEM_LEVEL]
    runs = [size for size in data if size.level != L0]
    if not runs:
        return 1.0 if data else 0.0
    return total_bytes(data) / runs[-1].size_bytes


def read_amplification(sizes: Iterable[LevelSize]) -> int:
    """Return the most SSTs that a read of one key may search, without regard to filters."""
    return sum(size.ssts if size.level == L0 else 1 for size in sizes if size.level != SYSTEM_LEVEL)


def most_over_one_key(ssts: Collection[SstInfo]) -> int:
    """Return the greatest number of these SSTs that overlap at one key."""
    opening = sorted(info.first_key for info in ssts)
    closing = sorted(upper_bound(info) for info in ssts)
    most = 0
    closed = 0
    for opened, key in enumerate(opening, 1):
        while closing[closed] < key:
            closed += 1
        most = max(most, opened - closed)
    return most
