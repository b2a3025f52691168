"""Settings of a safekeeper: its logs, its queues and messages, and archiving."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings


class SafekeeperSettings(Settings):
    """A node that holds the write-ahead logs of databases until they are in the archive."""

    data: str = Field(
        default="",
        description="The folder of the logs, on a disk of this machine. It must survive restarts: "
        "a node that has lost it counts as a new node.",
    )
    unarchived_bytes_max: int = Field(
        default=8 * GIB,
        ge=16 * MIB,
        le=1024 * 1024 * GIB,
        description="Most bytes of one log that are not known to be in the archive. Beyond it "
        "appends are refused, while votes, tails and archiving continue.",
    )
    disk_free_bytes_min: int = Field(
        default=1 * GIB,
        ge=0,
        le=1024 * 1024 * GIB,
        description="Free bytes of the disk below which appends are refused.",
    )
    segment_bytes: int = Field(
        default=64 * MIB,
        ge=64 * KIB,
        le=4 * GIB,
        description="Size of the files of a log; space for one is set aside at once.",
    )
    recent_bytes_max: int = Field(
        default=64 * MIB,
        ge=0,
        le=1024 * GIB,
        description="Memory for the end of one log, for replicas and members that follow closely. "
        "Records that are not on the disk yet are held in addition.",
    )
    append_queue_bytes_max: int = Field(
        default=64 * MIB,
        ge=1 * MIB,
        le=16 * GIB,
        description="Most bytes of one writer's appends that wait for the disk. Beyond it appends "
        "are received no faster than they are synced.",
    )
    relay_queue_bytes_max: int = Field(
        default=16 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Most bytes that wait to be forwarded to one other safekeeper, when a writer "
        "asks for that. Beyond it records are dropped, and the writer sends them itself.",
    )
    piece_bytes_max: int = Field(
        default=1 * MIB,
        ge=4 * KIB,
        le=32 * MIB,
        description="Most bytes of records in one message to a replica or a writer, unless one "
        "record alone is larger.",
    )
    tail_heartbeat_ms: int = Field(
        default=1_000,
        ge=10,
        le=600_000,
        description="Longest time between two messages to a replica, milliseconds.",
    )
    retire_interval_ms: int = Field(
        default=60_000,
        ge=10,
        le=86_400_000,
        description="Interval at which this node checks the manifests for logs that are not needed "
        "any more, milliseconds. A log that two checks have found unneeded is deleted; one that is "
        "not fully archived is set aside after ten checks. A log that was requested and is in no "
        "manifest yet is kept for ten checks as well.",
    )


class ArchivingSettings(Settings):
    """Archiving: how soon, how much at once, and when a safekeeper does it without appointment."""

    archive_parallel_uploads: int = Field(
        default=4,
        ge=1,
        le=64,
        description="WAL objects of one database that a safekeeper uploads at once.",
    )
    archive_upload_timeout_ms: int = Field(
        default=60_000,
        ge=10,
        le=3_600_000,
        description="An upload that takes longer is begun again, milliseconds.",
    )
    archive_look_interval_ms: int = Field(
        default=10_000,
        ge=10,
        le=3_600_000,
        description="Interval at which a safekeeper lists the archive, and drops what is there "
        "from its log, milliseconds. It lists nothing while there is nothing to drop.",
    )
    archive_manifest_interval_ms: int = Field(
        default=60_000,
        ge=10,
        le=3_600_000,
        description="Interval at which a safekeeper checks that a manifest still names it, "
        "milliseconds.",
    )
    archive_unasked_ms: int = Field(
        default=30_000,
        ge=10,
        le=3_600_000,
        description="When a WAL object has been missing from the archive for so long, a safekeeper "
        "that was not appointed archives it, milliseconds; a second one after twice the time.",
    )
    archive_pause_ms: int = Field(
        default=20,
        ge=0,
        le=60_000,
        description="Least time between two checks of a safekeeper for WAL objects that are "
        "complete in its own log, milliseconds.",
    )
    archive_read_bytes: int = Field(
        default=4 * MIB,
        ge=4 * KIB,
        le=1 * GIB,
        description="Bytes of a log that are read at once to find the objects that are complete.",
    )
