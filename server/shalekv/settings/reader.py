"""Settings of a reader: how it follows the writer, and its cache on disk."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shalekv.settings.model import GIB, MIB, Settings


class SnapshotChoice(StrEnum):
    """The snapshot with which a reader protects the objects that it reads."""

    OWN = "own"
    NONE = "none"


class TailChoice(StrEnum):
    """The use of safekeepers by a reader of a quorum database."""

    AUTO = "auto"
    OFF = "off"


class ReaderSettings(Settings):
    """Following the writer: polling, the protecting snapshot, memory."""

    snapshot: SnapshotChoice = Field(
        default=SnapshotChoice.OWN,
        description="own: the reader keeps a snapshot in the manifest, so that no object that it "
        "reads is deleted. none: it does not edit the manifest, and reads it again when an object "
        "is gone. Then it writes nothing but the object `clock`, on stores that report their time "
        "in no other way.",
    )
    poll_interval_ms: int = Field(
        default=250,
        ge=1,
        le=3_600_000,
        description="Interval at which a reader polls for the next WAL object while the writer "
        "writes, milliseconds. Reads that require a newer state make it poll at once.",
    )
    poll_interval_min_ms: int = Field(
        default=20,
        ge=0,
        le=60_000,
        description="Least time between two such polls, also those that reads require, "
        "milliseconds.",
    )
    poll_interval_idle_ms: int = Field(
        default=5_000,
        ge=1,
        le=3_600_000,
        description="While nothing is written, the interval between polls doubles up to this, "
        "milliseconds.",
    )
    manifest_interval_ms: int = Field(
        default=15_000,
        ge=10,
        le=3_600_000,
        description="Interval at which a reader checks the manifest for new levels and for another "
        "writer, milliseconds.",
    )
    tail: TailChoice = Field(
        default=TailChoice.AUTO,
        description="Reading a WAL that is in safekeepers. auto: the reader receives committed "
        "records from a safekeeper at once, and polls the bucket only when none answers. off: it "
        "sees only what is archived, and connects only to the bucket.",
    )
    reader_snapshot_ttl_s: int = Field(
        default=300,
        ge=2,
        le=86_400,
        description="Lifetime of the snapshots that protect the objects that a reader reads, "
        "seconds. They are renewed before half of it is over.",
    )
    reader_open_timeout_ms: int = Field(
        default=60_000,
        ge=1,
        le=3_600_000,
        description="How long a starting reader tries to put its snapshot into the manifest, "
        "milliseconds.",
    )
    reader_memtable_bytes_max: int = Field(
        default=248 * MIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for writes that are not compacted yet, overhead included. When it is "
        "full, the reader waits for the compactor and falls behind. It should be at least "
        "memtable_bytes_max of the writer.",
    )
    reader_parallel_reads: int = Field(
        default=16, ge=1, le=256, description="WAL objects that a reader fetches at once."
    )


class DiskCacheSettings(Settings):
    """An optional cache of parts of SSTs on the local disk."""

    disk_cache_path: str = Field(
        default="",
        description="A folder for parts of SSTs that were read, so that they need not be fetched "
        "again. It survives restarts, may be shared by several processes of one host and by "
        "several databases, and may be deleted at any time. Empty: no such cache.",
    )
    disk_cache_bytes: int = Field(
        default=4 * GIB,
        ge=1 * MIB,
        le=1024 * 1024 * GIB,
        description="Most bytes that all processes that share the folder keep there together.",
    )
