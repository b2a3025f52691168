"""The status of a server, as `Client.status` returns it.

The parts of a status come first: how a process follows, is watched and is called; safekeepers;
levels and the object store.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.v1 import admin_pb2
from shalekv_client.results import View, known, view_of


class ReaderState(enum.Enum):
    """The state of a reader. The numbers are those of the protocol."""

    LOADING = 1  # it reads the state that was there when it began
    FOLLOWING = 2
    GAP = 3  # it waits for a WAL object although later ones are there
    CUT_OFF = 4  # the store does not answer: reads are answered from the state it has
    FULL = 5  # its memory is full: it waits for the compactor


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """The state of a reader that follows the writer."""

    state: ReaderState | None  # None: one unknown to this client
    next_wal_id: int
    snapshot_id: bytes  # that protects what it reads; empty: none
    snapshot_expire_time_s: int
    snapshots_lost: int
    wal_objects_applied: int  # since it began to serve
    empty_polls: int
    poll_interval_ms: int  # the present one
    gaps: int
    gap_ms: int  # in all
    writer_address: str  # HOST:PORT; empty: the writer has not published it
    open_ms: int
    # The safekeeper from which it gets records that are not archived yet; empty: it has none.
    tail_address: str = ""
    tails: int = 0  # that were begun


@dataclass(frozen=True, slots=True)
class Readiness:
    """Readiness of a server for calls of one kind, reads or writes, and why it lacks."""

    is_ready: bool
    cause: str = ""  # in two words, such as "store unreachable"
    problem: str = ""  # the last error
    unready_ms: int = 0  # since the last success


@dataclass(frozen=True, slots=True)
class WatchStatus:
    """The watches of a process."""

    watches: int
    streams: int
    buffered_bytes: int
    buffered_bytes_max: int  # of each stream
    commits_told: int  # delivered commits; one that went to several watches counts for each
    catching_up: int  # watches that read the WAL from the store
    cut: int  # watches that were too slow


@dataclass(frozen=True, slots=True)
class CallStatus:
    """The calls of one method, since the process began to serve."""

    method: str  # such as "KV.Get"; an operation of a session is "Session.get"
    calls: int
    failures: int
    total_us: int
    histogram_us: tuple[int, ...]  # [i]: the calls that took from 2^i to 2^(i+1); [0]: or less

    def since(self, before: CallStatus | None) -> CallStatus:
        """Return the calls after `before`; all calls if the process was started again since."""
        if before is None or before.calls > self.calls:
            return self
        earlier = [*before.histogram_us, *[0] * len(self.histogram_us)]
        return CallStatus(
            self.method,
            self.calls - before.calls,
            self.failures - before.failures,
            self.total_us - before.total_us,
            tuple(map(int.__sub__, self.histogram_us, earlier)),
        )

    def percentile_us(self, part: float) -> float | None:
        """Return the approximate time within which `part` of the calls ended; None: no call did.

        `part` is from 0 to 1.
        """
        return percentile(self.histogram_us, part)


def percentile(histogram: Sequence[int], part: float) -> float | None:
    """Return the value that `part` (0 to 1) of the counted do not exceed; None: nothing is counted.

    The value is interpolated between the ends of its bucket.
    """
    wanted = sum(histogram) * part
    if not any(histogram):
        return None
    passed = 0
    for number, count in enumerate(histogram):
        if count and passed + count >= wanted:
            least = float(1 << number) if number else 0.0
            return least + (float(2 << number) - least) * max(0.0, wanted - passed) / count
        passed += count
    return float(1 << len(histogram))


class ProcessState(enum.Enum):
    """The state of one of several processes. The numbers are those of the protocol."""

    STARTING = 1  # it has no connections yet
    SERVING = 2
    SILENT = 3  # it has not answered for some seconds; it is replaced when that lasts
    ENDED = 4  # it is about to be replaced


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One of several processes that share a port."""

    number: int
    state: ProcessState | None  # None: one unknown to this client
    pid: int  # 0: it has ended
    uptime_ms: int  # 0: it does not serve yet
    replacements: int
    seq: int  # the newest commit that it shows; 0: it did not say
    staleness_ms: int
    calls: int  # that it has answered


def process_of(status: admin_pb2.ProcessStatus) -> ProcessStatus:
    """Decode the status of one of several processes."""
    return ProcessStatus(
        number=status.number,
        state=known(ProcessState, status.state),
        pid=status.pid,
        uptime_ms=status.uptime_ms,
        replacements=status.replacements,
        seq=status.seq,
        staleness_ms=status.staleness_ms,
        calls=status.calls,
    )


def reader_of(status: admin_pb2.ReaderStatus) -> ReaderStatus:
    """Decode the status of a reader."""
    return ReaderStatus(
        state=known(ReaderState, status.state),
        next_wal_id=status.next_wal_id,
        snapshot_id=status.snapshot_id,
        snapshot_expire_time_s=status.snapshot_expire_time_s,
        snapshots_lost=status.snapshots_lost,
        wal_objects_applied=status.wal_objects_applied,
        empty_polls=status.empty_polls,
        poll_interval_ms=status.poll_interval_ms,
        gaps=status.gaps,
        gap_ms=status.gap_ms,
        writer_address=status.writer_address,
        open_ms=status.open_ms,
        tail_address=status.tail_address,
        tails=status.tails,
    )


def watches_of(status: admin_pb2.WatchStatus) -> WatchStatus:
    """Decode the status of watches."""
    return WatchStatus(
        watches=status.watches,
        streams=status.streams,
        buffered_bytes=status.buffered_bytes,
        buffered_bytes_max=status.buffered_bytes_max,
        commits_told=status.commits_told,
        catching_up=status.catching_up,
        cut=status.cut,
    )


def call_of(status: admin_pb2.CallStatus) -> CallStatus:
    """Decode the status of the calls of one method."""
    return CallStatus(
        method=status.method,
        calls=status.calls,
        failures=status.failures,
        total_us=status.total_us,
        histogram_us=tuple(status.histogram_us),
    )


def readiness_of(status: admin_pb2.Readiness) -> Readiness:
    """Decode a readiness."""
    return Readiness(status.is_ready, status.cause, status.problem, status.unready_ms)


class WalMode(enum.Enum):
    """The place where writes are made durable. The numbers are those of the protocol."""

    OBJECT_STORE = 1
    QUORUM = 2


@dataclass(frozen=True, slots=True)
class QuorumMemberStatus:
    """A safekeeper, as the writer knows it."""

    member_id: bytes
    address: str  # HOST:PORT
    is_connected: bool  # it follows the writer
    flushed_lsn: int  # the last record that it has on disk; 0: not known
    archived_wal_id: int | None  # it has seen all objects up to this one in the store
    is_full: bool  # it has no space for more
    is_next: bool  # one of the new members, while the members are being changed
    problem: str  # why it does not follow


@dataclass(frozen=True, slots=True)
class QuorumStatus:
    """The state of a WAL in safekeepers, as the writer knows it."""

    generation: int  # the number of changes of the members
    members: tuple[QuorumMemberStatus, ...]
    last_lsn: int
    committed_lsn: int  # a majority has all records up to it
    last_wal_id: int | None  # the object into which the last record goes
    archived_wal_id: int | None  # all objects up to it are in the store
    unarchived_bytes: int
    archiver_id: bytes  # the member that is appointed to archive; empty: none
    problem: str  # why no writes are accepted; empty: writes are accepted

    @property
    def archiver(self) -> str:
        """The address of the member that archives; empty: none is appointed."""
        found = (each.address for each in self.members if each.member_id == self.archiver_id)
        return next(found, "")


def quorum_of(status: admin_pb2.QuorumStatus) -> QuorumStatus:
    """Decode the status of safekeepers."""
    return QuorumStatus(
        generation=status.generation,
        members=tuple(map(_member, status.members)),
        last_lsn=status.last_lsn,
        committed_lsn=status.committed_lsn,
        last_wal_id=status.last_wal_id if status.HasField("last_wal_id") else None,
        archived_wal_id=status.archived_wal_id if status.HasField("archived_wal_id") else None,
        unarchived_bytes=status.unarchived_bytes,
        archiver_id=status.archiver_id,
        problem=status.problem,
    )


def _member(status: admin_pb2.QuorumMemberStatus) -> QuorumMemberStatus:
    return QuorumMemberStatus(
        member_id=status.member_id,
        address=status.address,
        is_connected=status.is_connected,
        flushed_lsn=status.flushed_lsn,
        archived_wal_id=status.archived_wal_id if status.HasField("archived_wal_id") else None,
        is_full=status.is_full,
        is_next=status.is_next,
        problem=status.problem,
    )


@dataclass(frozen=True, slots=True)
class LevelStatus:
    """One level. Level 0 has SSTs that may overlap, level 63 the records of the system."""

    level: int
    ssts: int
    bytes: int
    entries: int  # tombstones included
    tombstones: int


@dataclass(frozen=True, slots=True)
class LevelsStatus:
    """The levels, their amplification, and the work of the compactor that is due."""

    levels: tuple[LevelStatus, ...]
    bytes: int
    space_amplification: float  # bytes for one byte of the lowest level; 0: there is no data
    read_amplification: int  # SSTs that a read of one key may have to open
    wal_objects: int  # that are not compacted
    uncompacted_bytes: int  # of their contents in memory
    debt_bytes: int  # that compactions have yet to read, approximately


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
        """The share of reads that were hits; 1 if there were no reads."""
        reads = self.hits + self.misses
        return self.hits / reads if reads else 1.0


@dataclass(frozen=True, slots=True)
class ReadStatus:
    """Caches and filters in reads of the levels, since the process began to serve."""

    blocks: CacheStatus
    metadata: CacheStatus  # footers, indexes, filters
    filter_negatives: int
    filter_false_positives: int
    disk: CacheStatus | None = None  # None: there is none


@dataclass(frozen=True, slots=True)
class StoreRequestStatus:
    """Requests of one kind to the object store, since the process began to serve."""

    operation: str
    folder: str  # empty: the request is about no single folder
    requests: int
    failures: int  # without an answer
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """A snapshot, and the bytes that it protects from deletion (None: not known)."""

    id: bytes
    name: str
    manifest_id: int
    expire_time_s: int  # 0: never
    pinned_bytes: int | None
    pinned_alone_bytes: int | None  # that only this snapshot protects


def levels_of(reply: admin_pb2.StatusReply) -> LevelsStatus:
    """Decode the status of levels and compaction."""
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
    """Decode the status of caches and filters."""
    return ReadStatus(
        blocks=_cache(status.blocks),
        metadata=_cache(status.metadata),
        filter_negatives=status.filter_negatives,
        filter_false_positives=status.filter_false_positives,
        disk=_cache(status.disk) if status.HasField("disk") else None,
    )


def request_of(status: admin_pb2.StoreRequestStatus) -> StoreRequestStatus:
    """Decode the status of one kind of request."""
    return StoreRequestStatus(
        operation=status.operation,
        folder=status.folder,
        requests=status.requests,
        failures=status.failures,
        objects=status.objects,
        bytes=status.bytes,
    )


def snapshot_of(status: admin_pb2.SnapshotStatus) -> SnapshotStatus:
    """Decode the status of one snapshot."""
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


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """The state of the write path."""

    durable_prefix_seq: int  # every commit below it is durable
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
    bytes_max: int  # beyond it writes are refused
    runs: int


@dataclass(frozen=True, slots=True)
class ManifestStatus:
    """The newest manifest that the process knows."""

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
    """The memory of a process for data, in all and by part."""

    bytes: int
    bytes_max: int
    parts: tuple[MemoryPart, ...]


@dataclass(frozen=True, slots=True)
class AccessStatus:
    """Counts of what access control has refused since the process began to serve."""

    denied: int  # operations that the roles of the caller did not allow
    unauthenticated: int  # calls without valid credentials
    quota_exceeded: int  # operations for which a quota did not leave enough
    audit_lines_lost: int  # that could not be written


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a process."""

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
    watches: WatchStatus | None = None  # None: the server does not report it
    calls: tuple[CallStatus, ...] = ()  # methods that were called, by name
    quorum: QuorumStatus | None = None  # None without safekeepers, and at a reader
    read_readiness: Readiness | None = None  # None: the server does not report it
    write_readiness: Readiness | None = None  # None at a reader, too
    processes: tuple[ProcessStatus, ...] = ()  # that share the port; empty: there is one alone
    access: AccessStatus | None = None  # None: the server does not report it
    wall_ms: int = 0  # the clock of the server's machine, since the Unix epoch; 0: not known


def status_of(reply: admin_pb2.StatusReply) -> Status:
    """Decode the reply to `Client.status`."""
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
        processes=tuple(map(process_of, reply.processes)),
        access=_access(reply.access) if reply.HasField("access") else None,
        wall_ms=reply.wall_ms,
    )


def _access(status: admin_pb2.AccessStatus) -> AccessStatus:
    return AccessStatus(
        denied=status.denied,
        unauthenticated=status.unauthenticated,
        quota_exceeded=status.quota_exceeded,
        audit_lines_lost=status.audit_lines_lost,
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
