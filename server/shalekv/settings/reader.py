"""Settings of a reader: how it follows the writer."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shalekv.settings.model import GIB, MIB, Settings


class SnapshotChoice(StrEnum):
    """Whether a reader protects what it reads."""

    OWN = "own"
    NONE = "none"


class TailChoice(StrEnum):
    """Whether a reader of a quorum database asks its safekeepers."""

    AUTO = "auto"
    OFF = "off"


class ReaderSettings(Settings):
    """How a reader follows the writer."""

    snapshot: SnapshotChoice = Field(
        default=SnapshotChoice.OWN,
        description="own: the reader keeps a snapshot in the manifest, so that nothing is deleted "
        "that it reads. none: it edits no manifest, and reads it again when an object is gone. All "
        "that it writes is `clock`, where the store tells its time in no other way.",
    )
    poll_interval_ms: int = Field(
        default=250,
        ge=1,
        le=3_600_000,
        description="How often a reader asks for the next WAL object while the writer writes, "
        "milliseconds. Reads that demand a newer state make it ask at once.",
    )
    poll_interval_min_ms: int = Field(
        default=20,
        ge=0,
        le=60_000,
        description="The least time between two such questions, whoever demands them.",
    )
    poll_interval_idle_ms: int = Field(
        default=5_000,
        ge=1,
        le=3_600_000,
        description="While nothing is written the time between two questions doubles up to this.",
    )
    manifest_interval_ms: int = Field(
        default=15_000,
        ge=10,
        le=3_600_000,
        description="How often a reader looks for new levels, and for another writer.",
    )
    tail: TailChoice = Field(
        default=TailChoice.AUTO,
        description="Where safekeepers hold the WAL. auto: the reader hears from one of them what "
        "is committed, at once, and asks the bucket only when none answers. off: it sees what is "
        "archived, and connects to nothing but the bucket.",
    )
    reader_snapshot_ttl_s: int = Field(
        default=300,
        ge=2,
        le=86_400,
        description="Life of the snapshots that protect what a reader reads, seconds. They are "
        "renewed before half of it is over.",
    )
    reader_open_timeout_ms: int = Field(
        default=60_000,
        ge=1,
        le=3_600_000,
        description="How long a reader that begins tries to put its snapshot into the manifest.",
    )
    reader_memtable_bytes_max: int = Field(
        default=248 * MIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for what is not compacted yet, overhead included. Past it a reader "
        "waits for the compactor, and grows stale. It should be that of the writer, or more.",
    )
    reader_parallel_reads: int = Field(
        default=16, ge=1, le=256, description="WAL objects that a reader fetches at once."
    )


class DiskCacheSettings(Settings):
    """An optional cache of parts of SSTs on the local disk."""

    disk_cache_path: str = Field(
        default="",
        description="A folder for parts of SSTs that were read, so that they need not be fetched "
        "again. It survives restarts, may be shared by processes of one host and databases, and "
        "may be deleted at any time. Empty: no such cache.",
    )
    disk_cache_bytes: int = Field(
        default=4 * GIB,
        ge=1 * MIB,
        le=1024 * 1024 * GIB,
        description="What all processes that share the folder may keep there, bytes.",
    )
