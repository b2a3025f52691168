"""Settings of the roles: the writer and its log, the reader, the safekeeper."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from shalekv.settings.model import GIB, KIB, MIB, Settings

CLOCK_JUMP_MAX_S = 3_600


class WalCodec(StrEnum):
    """The compression of the blocks of WAL objects."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


class WriterSettings(Settings):
    """Opening, group commit and back-pressure of the writer."""

    max_parallel_writes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Most WAL objects in flight at once, those with an unknown outcome included, "
        "and most slots between the first and the last of them. The next writer must fence as many "
        "slots.",
        json_schema_extra={"user": "operator: throughput against a slower takeover"},
    )
    flush_interval_ms: int | None = Field(
        default=None,
        ge=0,
        le=60_000,
        description="Least time between two WAL objects, milliseconds. It bounds the number of "
        "requests; a first write to an idle log does not wait for it. Not set: 50 on stores that "
        "charge for requests, 0 on file:// and memory://.",
        json_schema_extra={"user": "operator: cost of requests against latency"},
    )
    flush_bytes: int = Field(
        default=4 * MIB,
        ge=4 * KIB,
        le=256 * MIB,
        description="Once this many bytes are queued, a WAL object is flushed before "
        "flush_interval_ms is over. It takes no more than this unless one batch alone is larger.",
        json_schema_extra={"user": "operator: size of WAL objects on a slow network"},
    )
    wal_codec: WalCodec = Field(
        default=WalCodec.NONE,
        description="Compression of the blocks of WAL objects. Readers of version 0.1 refuse "
        "compressed blocks.",
        json_schema_extra={"user": "operator: network and storage against CPU"},
    )
    queued_bytes_max: int = Field(
        default=32 * MIB,
        ge=1 * MIB,
        le=16 * GIB,
        description="Most bytes of writes that are queued or being uploaded. Beyond it writes "
        "wait for admission.",
        json_schema_extra={"user": "operator sizing memory"},
    )
    admission_waiting_bytes_max: int = Field(
        default=16 * MIB,
        ge=0,
        le=16 * GIB,
        description="Most bytes of writes that wait for admission. Beyond it writes are refused at "
        "once with RESOURCE_EXHAUSTED.",
        json_schema_extra={"user": "operator sizing memory"},
    )
    admission_timeout_ms: int = Field(
        default=1_000,
        ge=0,
        le=600_000,
        description="How long a write waits for admission to the queue and the memtable, before "
        "it is refused with RESOURCE_EXHAUSTED, milliseconds.",
        json_schema_extra={
            "user": "operator: waiting against an early refusal of clients with short deadlines"
        },
    )
    memtable_bytes_max: int = Field(
        default=176 * MIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for writes that are not compacted yet, overhead included. Beyond it "
        "writes wait for admission, and one that is larger is refused at once.",
        json_schema_extra={"user": "operator sizing memory"},
    )
    fence_poll_ms: int = Field(
        default=5_000,
        ge=10,
        le=3_600_000,
        description="Interval at which a writer checks whether another has taken over, "
        "milliseconds. At most open_timeout_ms.",
        json_schema_extra={
            "user": "operator: cost of requests against how soon a replaced writer notices it"
        },
    )
    open_timeout_ms: int = Field(
        default=60_000,
        ge=1,
        le=3_600_000,
        description="How long opening tries to claim the manifest before it fails, milliseconds.",
        json_schema_extra={"user": "operator of a store that is slow or contended"},
    )
    open_once: bool = Field(
        default=False,
        description="Do not fence a writer that has opened the database after this process began "
        "to open it: end with exit code 8 instead. An earlier writer is fenced, as without this. "
        "Not for servers with elect.",
        json_schema_extra={
            "user": "operator whose supervisor restarts writers: no two fence each other"
        },
    )
    clock_jump_max_s: int = Field(
        default=CLOCK_JUMP_MAX_S,
        ge=60,
        le=3_153_600_000,
        description="A database is opened only if the store's clock differs from that of this "
        "machine, or from the time of the last commit, by no more than this, seconds. While the "
        "writer serves, it follows jumps of the store's clock up to this.",
        json_schema_extra={"user": "operator of a machine or a store whose clock was set"},
    )
    snapshot_ttl_s: int = Field(
        default=300,
        ge=2,
        le=86_400,
        description="Lifetime of the snapshots that protect what a serving process reads, seconds. "
        "They are renewed before half of it is over.",
        json_schema_extra={
            "user": "operator: edits of the manifest against storage that a killed writer keeps"
        },
    )
    direct_ingest_bytes: int = Field(
        default=16 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Size above which a batch is written to SSTs of the levels at once, and not to "
        "the WAL and the memtable.",
        json_schema_extra={"user": "operator of large batches: memory against small files"},
    )
    idempotency_window_s: int = Field(
        default=86_400,
        ge=1,
        le=2_592_000,
        description="How long an idempotency key is remembered, in seconds of the store's clock.",
        json_schema_extra={
            "user": "operator: storage against how late a client may repeat a write"
        },
    )
    expiry_sweep_interval_ms: int = Field(
        default=1_000,
        ge=0,
        le=86_400_000,
        description="Interval at which the removal of expired values is written, so that watches "
        "deliver it, milliseconds. It is one more change for each value. 0: never. Reads do not "
        "see expired values either way.",
        json_schema_extra={
            "user": "operator: cost of writes against how soon watches see that a value expired"
        },
    )

    @model_validator(mode="after")
    def _fences_are_noticed_in_time(self) -> Self:
        if self.fence_poll_ms > self.open_timeout_ms:
            raise ValueError(
                f"fence_poll_ms must be at most open_timeout_ms, {self.open_timeout_ms}, and not "
                f"{self.fence_poll_ms}: a writer that is taken over must notice it before its "
                "successor gives up"
            )
        return self


class SafekeeperTransport(StrEnum):
    """The path of records to the safekeepers."""

    DIRECT = "direct"
    CHAIN = "chain"


class QuorumSettings(Settings):
    """The write-ahead log in safekeepers: replication, and archiving to the object store."""

    vote_timeout_ms: int = Field(
        default=15_000,
        ge=10,
        le=3_600_000,
        description="How long each step of opening waits for a majority of the safekeepers, "
        "milliseconds. Then opening fails, and names those that have not answered.",
        json_schema_extra={
            "user": "operator: how long a start waits for safekeepers that start as well"
        },
    )
    quorum_timeout_ms: int = Field(
        default=5_000,
        ge=10,
        le=3_600_000,
        description="How long a write waits for a majority, milliseconds. Then it ends with an "
        "unknown outcome, and writes are refused with UNAVAILABLE until a majority answers.",
        json_schema_extra={
            "user": "operator: deadlines of clients against outages that pass unnoticed"
        },
    )
    safekeeper_transport: SafekeeperTransport = Field(
        default=SafekeeperTransport.DIRECT,
        description="Path of records. direct: from the writer to every safekeeper. chain: to the "
        "first safekeeper, which forwards them to the next, and so on; each still answers to the "
        "writer.",
        json_schema_extra={"user": "operator: upload bandwidth of the writer against latency"},
    )
    commit_broadcast: bool = Field(
        default=False,
        description="Let safekeepers also send each other the position up to which the log is "
        "committed.",
        json_schema_extra={
            "user": "operator of readers that must be fresh although the writer is far away"
        },
    )
    unarchived_log_bytes_max: int = Field(
        default=24 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory of the writer for records that are not in the archive yet. Beyond it "
        "writes wait for admission.",
        json_schema_extra={"user": "operator sizing memory for an outage of the object store"},
    )
    archive_interval_ms: int | None = Field(
        default=None,
        ge=0,
        le=3_600_000,
        description="Interval between WAL objects in the archive, milliseconds: the writes of that "
        "time share one. No write waits for it. Not set: 250 on stores that charge for requests, "
        "50 on file:// and memory://. 0: each group of writes is an object.",
        json_schema_extra={
            "user": "operator: cost of requests against the freshness of readers of the bucket"
        },
    )


class SnapshotChoice(StrEnum):
    """The snapshot with which a reader protects the objects that it reads."""

    OWN = "own"
    NONE = "none"


class TailChoice(StrEnum):
    """The use of safekeepers by a reader of a quorum database."""

    AUTO = "auto"
    OFF = "off"


class ReaderSettings(Settings):
    """Processes, following the writer: polling, the protecting snapshot, memory."""

    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that serve on the port. Each follows the writer by itself and "
        "answers the connections that it is given; one that dies is replaced. memory_bytes and its "
        "parts are divided among them. Other limits, such as concurrent_calls_max, apply to each.",
        json_schema_extra={"user": "operator of a machine with several cores"},
    )
    snapshot: SnapshotChoice = Field(
        default=SnapshotChoice.OWN,
        description="own: the reader keeps a snapshot in the manifest, so that no object that it "
        "reads is deleted. none: it does not edit the manifest, and reads it again when an object "
        "is gone. Then it writes nothing but the object `clock`, on stores that report their time "
        "in no other way.",
        json_schema_extra={"user": "operator of readers that may not write to the bucket"},
    )
    poll_interval_ms: int = Field(
        default=250,
        ge=1,
        le=3_600_000,
        description="Interval at which a reader polls for the next WAL object while the writer "
        "writes, milliseconds. Reads that require a newer state make it poll at once.",
        json_schema_extra={"user": "operator: cost of requests against the freshness of reads"},
    )
    poll_interval_idle_ms: int = Field(
        default=5_000,
        ge=1,
        le=3_600_000,
        description="While nothing is written, the interval between polls doubles up to this, "
        "milliseconds.",
        json_schema_extra={"user": "operator: cost of requests against the freshness of reads"},
    )
    manifest_interval_ms: int = Field(
        default=15_000,
        ge=10,
        le=3_600_000,
        description="Interval at which a reader checks the manifest for new levels and for another "
        "writer, milliseconds.",
        json_schema_extra={
            "user": "operator: cost of requests against memory for what is compacted"
        },
    )
    tail: TailChoice = Field(
        default=TailChoice.AUTO,
        description="Reading a WAL that is in safekeepers. auto: the reader receives committed "
        "records from a safekeeper at once, and polls the bucket only when none answers. off: it "
        "sees only what is archived, and connects only to the bucket.",
        json_schema_extra={"user": "operator of readers that cannot reach the safekeepers"},
    )
    reader_snapshot_ttl_s: int = Field(
        default=300,
        ge=2,
        le=86_400,
        description="Lifetime of the snapshots that protect the objects that a reader reads, "
        "seconds. They are renewed before half of it is over.",
        json_schema_extra={
            "user": "operator: edits of the manifest against storage that a killed reader keeps"
        },
    )
    reader_memtable_bytes_max: int = Field(
        default=248 * MIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for writes that are not compacted yet, overhead included. When it is "
        "full, the reader waits for the compactor and falls behind. It should be at least "
        "memtable_bytes_max of the writer.",
        json_schema_extra={"user": "operator sizing memory"},
    )


class DiskCacheSettings(Settings):
    """An optional cache of parts of SSTs on the local disk."""

    disk_cache_path: str = Field(
        default="",
        description="A folder for parts of SSTs that were read, so that they need not be fetched "
        "again. It survives restarts, may be shared by several processes of one host and by "
        "several databases, and may be deleted at any time. Empty: no such cache.",
        json_schema_extra={"user": "operator with a local disk: cost and latency of reads"},
    )
    disk_cache_bytes: int = Field(
        default=4 * GIB,
        ge=1 * MIB,
        le=1024 * 1024 * GIB,
        description="Most bytes that all processes that share the folder keep there together.",
        json_schema_extra={"user": "operator sizing the disk"},
    )


class SafekeeperSettings(Settings):
    """A node that holds the write-ahead logs of databases until they are in the archive."""

    data: str = Field(
        default="",
        description="The folder of the logs, on a disk of this machine. It must survive restarts: "
        "a node that has lost it counts as a new node.",
        json_schema_extra={"user": "operator: the disk of the logs"},
    )
    unarchived_bytes_max: int = Field(
        default=8 * GIB,
        ge=16 * MIB,
        le=1024 * 1024 * GIB,
        description="Most bytes of one log that are not known to be in the archive. Beyond it "
        "appends are refused, while votes, tails and archiving continue.",
        json_schema_extra={"user": "operator sizing the disk for an outage of the object store"},
    )
    disk_free_bytes_min: int = Field(
        default=1 * GIB,
        ge=0,
        le=1024 * 1024 * GIB,
        description="Free bytes of the disk below which appends are refused.",
        json_schema_extra={"user": "operator of a disk that others use as well"},
    )
    segment_bytes: int = Field(
        default=64 * MIB,
        ge=64 * KIB,
        le=4 * GIB,
        description="Size of the files of a log; space for one is set aside at once.",
        json_schema_extra={
            "user": "operator of many small databases: disk that is set aside for each"
        },
    )
    recent_bytes_max: int = Field(
        default=64 * MIB,
        ge=0,
        le=1024 * GIB,
        description="Memory for the end of one log, from which replicas and members read. "
        "Records that are not on the disk yet are held in addition.",
        json_schema_extra={"user": "operator sizing memory"},
    )


class ArchivingSettings(Settings):
    """Archiving: how often the archive is listed, and when members without appointment archive."""

    archive_list_interval_ms: int = Field(
        default=10_000,
        ge=10,
        le=3_600_000,
        description="Interval at which a safekeeper lists the archive, and drops what is there "
        "from its log, milliseconds. It lists nothing while there is nothing to drop.",
        json_schema_extra={"user": "operator: cost of requests against disk"},
    )
    archive_unappointed_ms: int = Field(
        default=30_000,
        ge=10,
        le=3_600_000,
        description="When a WAL object has been missing from the archive for so long, a safekeeper "
        "that was not appointed archives it, milliseconds; a second one after twice the time.",
        json_schema_extra={
            "user": "operator: uploads made twice against disk when the appointed node is gone"
        },
    )
