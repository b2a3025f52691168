"""What a status tells of the levels and of the object store."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class LevelStatus:
    """One level. 0: SSTs that may overlap; 63: records of the system."""

    level: int
    ssts: int
    bytes: int
    entries: int  # tombstones included
    tombstones: int


@dataclass(frozen=True, slots=True)
class LevelsStatus:
    """The levels, what they amplify, and what waits for the compactor."""

    levels: tuple[LevelStatus, ...]
    bytes: int
    space_amplification: float  # bytes for one byte of the lowest level; 0: there is no data
    read_amplification: int  # SSTs that a read of one key may have to look into
    wal_objects: int  # that are not compacted
    uncompacted_bytes: int  # memory of what they hold
    debt_bytes: int  # that compactions have yet to read, about


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """A cache, since the process began to serve."""

    hits: int
    misses: int
    requests: int  # to the store
    fetched_bytes: int
    bytes: int  # that it holds
    bytes_max: int

    @property
    def hit_rate(self) -> float:
        """The part of the reads that found what they wanted; of none at all, 1."""
        reads = self.hits + self.misses
        return self.hits / reads if reads else 1.0


@dataclass(frozen=True, slots=True)
class ReadStatus:
    """How reads of the levels were answered, since the process began to serve."""

    blocks: CacheStatus
    metadata: CacheStatus  # footers, indexes, filters
    filter_negatives: int
    filter_false_positives: int
    disk: CacheStatus | None = None  # None: there is none


@dataclass(frozen=True, slots=True)
class StoreRequestStatus:
    """What was asked of the object store, since the process began to serve."""

    operation: str
    folder: str  # empty: of none alone
    requests: int
    failures: int  # without an answer
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """A snapshot, and the bytes that it keeps from being deleted (None: not known)."""

    id: bytes
    name: str
    manifest_id: int
    expire_time_s: int  # 0: never
    pinned_bytes: int | None
    pinned_alone_bytes: int | None  # that nothing else keeps


def levels_of(reply: admin_pb2.StatusReply) -> LevelsStatus:
    """Levels and compaction."""
    levels, compaction = reply.levels, reply.compaction
    return LevelsStatus(
        levels=tuple(
            LevelStatus(each.level, each.ssts, each.bytes, each.entries, each.tombstones)
            for each in levels.levels
        ),
        bytes=levels.bytes,
        space_amplification=levels.space_amplification,
        read_amplification=levels.read_amplification,
        wal_objects=compaction.wal_objects,
        uncompacted_bytes=compaction.uncompacted_bytes,
        debt_bytes=compaction.debt_bytes,
    )


def reads_of(status: admin_pb2.ReadStatus) -> ReadStatus:
    """Caches and filters."""
    return ReadStatus(
        blocks=_cache(status.blocks),
        metadata=_cache(status.metadata),
        filter_negatives=status.filter_negatives,
        filter_false_positives=status.filter_false_positives,
        disk=_cache(status.disk) if status.HasField("disk") else None,
    )


def request_of(status: admin_pb2.StoreRequestStatus) -> StoreRequestStatus:
    """One kind of request."""
    return StoreRequestStatus(
        operation=status.operation,
        folder=status.folder,
        requests=status.requests,
        failures=status.failures,
        objects=status.objects,
        bytes=status.bytes,
    )


def snapshot_of(status: admin_pb2.SnapshotStatus) -> SnapshotStatus:
    """One snapshot."""
    snapshot = status.snapshot
    has_pinned, has_alone = status.HasField("pinned_bytes"), status.HasField("pinned_alone_bytes")
    return SnapshotStatus(
        id=snapshot.id,
        name=snapshot.name,
        manifest_id=snapshot.manifest_id,
        expire_time_s=snapshot.expire_time_s,
        pinned_bytes=status.pinned_bytes if has_pinned else None,
        pinned_alone_bytes=status.pinned_alone_bytes if has_alone else None,
    )


def _cache(status: admin_pb2.CacheStatus) -> CacheStatus:
    return CacheStatus(
        hits=status.hits,
        misses=status.misses,
        requests=status.requests,
        fetched_bytes=status.fetched_bytes,
        bytes=status.bytes,
        bytes_max=status.bytes_max,
    )
