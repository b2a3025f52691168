"""The status of a server, as `Client.status` returns it."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.v1 import admin_pb2
from shalekv_client.levels_status import (
    LevelsStatus,
    ReadStatus,
    SnapshotStatus,
    StoreRequestStatus,
    levels_of,
    reads_of,
    request_of,
    snapshot_of,
)
from shalekv_client.process_status import (
    CallStatus,
    ReaderStatus,
    Readiness,
    WatchStatus,
    call_of,
    reader_of,
    readiness_of,
    watches_of,
)
from shalekv_client.quorum_status import QuorumStatus, WalMode, quorum_of
from shalekv_client.results import View, known, view_of


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """The state of the write path."""

    durable_prefix_seq: int  # below it every commit is durable
    next_wal_id: int
    wal_objects_in_flight: int
    max_parallel_writes: int
    queued_bytes: int
    queued_bytes_max: int
    wal_objects_written: int  # since the process began to serve
    commits: int  # since the process began to serve
    open_ms: int
    wal_objects_replayed: int


@dataclass(frozen=True, slots=True)
class MemtableStatus:
    """The state of the memtable."""

    keys: int  # tombstones included
    bytes: int
    bytes_max: int  # past it writes are refused
    runs: int


@dataclass(frozen=True, slots=True)
class ManifestStatus:
    """What the manifest says that the process knows."""

    manifest_id: int
    wal_id_last_compacted: int | None
    compactor_epoch: int
    leveled_ssts: int
    snapshots: int
    wal_mode: WalMode | None = None  # None: one unknown to this client
    wal_members: tuple[str, ...] = ()  # safekeepers: "id in hexadecimal@HOST:PORT"
    wal_members_next: tuple[str, ...] = ()  # while a change of members is under way


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of the memory for data."""

    name: str  # of the setting that bounds it
    bytes: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """The memory of a process for data, in all and by parts."""

    bytes: int
    bytes_max: int
    parts: tuple[MemoryPart, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """What a process is and how it does."""

    view: View
    version: str
    url: str  # of the database, without credentials
    uptime_ms: int
    writer: WriterStatus | None  # None at a reader
    memtable: MemtableStatus
    manifest: ManifestStatus
    memory: MemoryStatus
    levels: LevelsStatus | None  # None, as `reads`, where the levels are not read
    reads: ReadStatus | None
    store_requests: tuple[StoreRequestStatus, ...]
    snapshots: tuple[SnapshotStatus, ...]  # that have not expired
    reader: ReaderStatus | None = None  # None at the writer
    watches: WatchStatus | None = None  # None: the server does not tell
    calls: tuple[CallStatus, ...] = ()  # methods that were called, by name
    quorum: QuorumStatus | None = None  # None without safekeepers, and at a reader
    read_readiness: Readiness | None = None  # None: the server does not tell
    write_readiness: Readiness | None = None  # None at a reader, too


def status_of(reply: admin_pb2.StatusReply) -> Status:
    """The status that a reply tells."""
    return Status(
        view=view_of(reply.header),
        version=reply.version,
        url=reply.url,
        uptime_ms=reply.uptime_ms,
        writer=_writer(reply.writer) if reply.HasField("writer") else None,
        memtable=MemtableStatus(
            keys=reply.memtable.keys,
            bytes=reply.memtable.bytes,
            bytes_max=reply.memtable.bytes_max,
            runs=reply.memtable.runs,
        ),
        manifest=_manifest(reply.manifest),
        memory=_memory(reply.memory),
        levels=levels_of(reply) if reply.HasField("levels") else None,
        reads=reads_of(reply.reads) if reply.HasField("reads") else None,
        store_requests=tuple(map(request_of, reply.store_requests)),
        snapshots=tuple(map(snapshot_of, reply.snapshots)),
        reader=reader_of(reply.reader) if reply.HasField("reader") else None,
        watches=watches_of(reply.watches) if reply.HasField("watches") else None,
        calls=tuple(map(call_of, reply.calls)),
        quorum=quorum_of(reply.quorum) if reply.HasField("quorum") else None,
        read_readiness=(
            readiness_of(reply.read_readiness) if reply.HasField("read_readiness") else None
        ),
        write_readiness=(
            readiness_of(reply.write_readiness) if reply.HasField("write_readiness") else None
        ),
    )


def _writer(status: admin_pb2.WriterStatus) -> WriterStatus:
    return WriterStatus(
        durable_prefix_seq=status.durable_prefix_seq,
        next_wal_id=status.next_wal_id,
        wal_objects_in_flight=status.wal_objects_in_flight,
        max_parallel_writes=status.max_parallel_writes,
        queued_bytes=status.queued_bytes,
        queued_bytes_max=status.queued_bytes_max,
        wal_objects_written=status.wal_objects_written,
        commits=status.commits,
        open_ms=status.open_ms,
        wal_objects_replayed=status.wal_objects_replayed,
    )


def _memory(status: admin_pb2.MemoryStatus) -> MemoryStatus:
    parts = [MemoryPart(part.name, part.bytes, part.bytes_max) for part in status.parts]
    return MemoryStatus(status.bytes, status.bytes_max, tuple(parts))


def _manifest(status: admin_pb2.ManifestStatus) -> ManifestStatus:
    compacted = status.HasField("wal_id_last_compacted")
    return ManifestStatus(
        manifest_id=status.manifest_id,
        wal_id_last_compacted=status.wal_id_last_compacted if compacted else None,
        compactor_epoch=status.compactor_epoch,
        leveled_ssts=status.leveled_ssts,
        snapshots=status.snapshots,
        wal_mode=known(WalMode, status.wal_mode),
        wal_members=tuple(status.wal_members),
        wal_members_next=tuple(status.wal_members_next),
    )
