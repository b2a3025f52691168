"""Settings of the jobs beside the writer: compactor and collector."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings

COMPACTOR_POLL_MS = 1_000  # a poll is two LISTs; a server that delays writes does not wait for it


class CompactorSettings(Settings):
    """Compaction: when it runs, and the shape of the levels."""

    compactor_idle_poll_ms: int = Field(
        default=15_000,
        ge=10,
        le=3_600_000,
        description="Longest interval between two checks of a compactor, milliseconds. The "
        "shortest is a second, or this if it is less; it doubles as long as the compactor finds "
        "nothing new, or fails. A server that delays writes wakes its own compactor at once.",
        json_schema_extra={"user": "operator: cost of requests of idle databases"},
    )
    wal_trigger_bytes: int = Field(
        default=22 * MIB,
        ge=1 * KIB,
        le=16 * GIB,
        description="Bytes of WAL objects from which on they are merged into L0 at once.",
        json_schema_extra={"user": "operator: cost of merges against memory and time of opening"},
    )
    wal_trigger_age_ms: int = Field(
        default=60_000,
        ge=0,
        le=86_400_000,
        description="Age at which a WAL object is merged into L0, however small, milliseconds.",
        json_schema_extra={"user": "operator: cost of merges of a database with few writes"},
    )
    l0_trigger_count: int = Field(
        default=4,
        ge=1,
        le=1_000,
        description="Number of SSTs in L0 from which on they are merged into the levels below.",
        json_schema_extra={"user": "operator: cost of writes against that of reads"},
    )
    base_level_bytes: int = Field(
        default=264 * MIB,
        ge=64 * KIB,
        le=1024 * GIB,
        description="Size below which the first level under L0 is not split into two.",
        json_schema_extra={"user": "operator: cost of writes against that of reads"},
    )
    idempotency_record_kept_s: int = Field(
        default=86_400,
        ge=1,
        le=2_592_000,
        description="How long an idempotency record is kept after its window is over, so that the "
        "repeat of an old write is recognized and refused, seconds. Should equal "
        "idempotency_window_s.",
        json_schema_extra={"user": "operator who has changed idempotency_window_s"},
    )
    expired_value_kept_s: int = Field(
        default=3_600,
        ge=0,
        le=31_536_000,
        description="How long an expired value is left to the writer, which writes its removal as "
        "a change, seconds. After that the next compaction drops it, without a change for watches. "
        "0: compactions drop it at once, if expiry_sweep_interval_ms is 0 as well.",
        json_schema_extra={"user": "operator: storage against watches that see each expiry"},
    )
    subcompaction_count_max: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Processes among which a compaction is divided by key range.",
        json_schema_extra={"user": "operator sizing CPU"},
    )
    subcompaction_memory_bytes: int = Field(
        default=64 * MIB,
        ge=8 * MIB,
        le=16 * GIB,
        description="Memory of one subcompaction for what it reads and writes.",
        json_schema_extra={"user": "operator sizing memory of the compactor"},
    )
    compaction_rate_bytes: int = Field(
        default=0,
        ge=0,
        le=64 * GIB,
        description="Most bytes that compactions of levels read and write in a second, for all "
        "databases of a process together; 0: no bound. Compactions on which delayed writes wait "
        "do not count.",
        json_schema_extra={
            "user": "operator: network and requests of compaction against those of clients"
        },
    )
    compactor_lease_ttl_s: int = Field(
        default=600,
        ge=2,
        le=86_400,
        description="Lifetime of the lease that protects the objects that a compaction writes, "
        "seconds. It is renewed before half of it is over.",
        json_schema_extra={
            "user": "operator: edits of the manifest against storage that a killed compactor keeps"
        },
    )

    @property
    def poll_ms(self) -> int:
        """The interval between checks for work while there is some, milliseconds."""
        return min(COMPACTOR_POLL_MS, self.compactor_idle_poll_ms)


class CollectorSettings(Settings):
    """Collection: how often, and from which age on objects are deleted."""

    collect_interval_ms: int = Field(
        default=60_000,
        ge=10,
        le=86_400_000,
        description="Interval at which the collector searches for objects that are not needed, "
        "milliseconds.",
        json_schema_extra={"user": "operator: cost of requests against storage"},
    )
    collect_age_s: int = Field(
        default=300,
        ge=0,
        le=31_536_000,
        description="Age until which an object that is not needed is kept, seconds by the store's "
        "clock.",
        json_schema_extra={
            "user": "operator: storage against how slow a reader without a snapshot may be"
        },
    )
    foreign_file_age_s: int = Field(
        default=86_400,
        ge=0,
        le=31_536_000,
        description="Age at which files in manifest/, wal/ and levels/ that are not objects of "
        "the database, such as temporary ones, are deleted, seconds.",
        json_schema_extra={
            "user": "operator who puts files into these folders, or whose uploads are slow"
        },
    )
    wal_retention_s: int = Field(
        default=3_600,
        ge=0,
        le=31_536_000,
        description="Age until which compacted WAL objects are kept, seconds by the store's clock, "
        "so that a watch can begin at a commit of that age. 0: they are deleted as other objects "
        "are. Collectors of one database must agree on it.",
        json_schema_extra={"user": "operator: storage against how far back a watch can begin"},
    )
    wal_retention_bytes: int = Field(
        default=1 * GIB,
        ge=0,
        le=1024 * GIB,
        description="Most bytes of compacted WAL objects that are kept for wal_retention_s: the "
        "newest of them.",
        json_schema_extra={"user": "operator: storage against how far back a watch can begin"},
    )
