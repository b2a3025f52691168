"""Settings of a safekeeper: where it keeps logs, how much of them, and how it tells of them."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings


class SafekeeperSettings(Settings):
    """A node that holds the write-ahead logs of databases until they are in the archive."""

    data: str = Field(
        default="",
        description="The folder of the logs, on a disk of this machine. It must survive restarts: "
        "a node that has lost it is another node.",
    )
    unarchived_bytes_max: int = Field(
        default=8 * GIB,
        ge=16 * MIB,
        le=1024 * 1024 * GIB,
        description="Most bytes of one log that are not known to be in the archive. Past it "
        "appends are refused, and votes, tails and archiving go on.",
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
        "What is not on the disk yet is held beside it.",
    )
    append_queue_bytes_max: int = Field(
        default=64 * MIB,
        ge=1 * MIB,
        le=16 * GIB,
        description="Most bytes of one writer's appends that wait for the disk. Past it they are "
        "read no faster than they are synced.",
    )
    relay_queue_bytes_max: int = Field(
        default=16 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Bytes that wait to be passed on to one other safekeeper, when a writer asks "
        "for that. What finds no room is dropped, and the writer sends it itself.",
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
        description="A replica hears of this node at least so often, milliseconds.",
    )
    retire_interval_ms: int = Field(
        default=60_000,
        ge=10,
        le=86_400_000,
        description="How often this node looks in the manifests for logs that are of no use any "
        "more, milliseconds. What two looks have found so is deleted; if some of it is not "
        "archived, it is set aside after ten. One that was asked for and is in no manifest yet is "
        "given ten as well.",
    )


# --- archiving
# Settings of how a safekeeper brings its logs into the archive.


class ArchivingSettings(Settings):
    """Archiving: how soon, how much at once, and when a safekeeper does it unasked."""

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
        description="An upload without an end for so long, milliseconds, is begun again.",
    )
    archive_look_interval_ms: int = Field(
        default=10_000,
        ge=10,
        le=3_600_000,
        description="How often a safekeeper lists the archive, and drops what it sees there from "
        "its log, milliseconds. It lists nothing while there is nothing to drop.",
    )
    archive_manifest_interval_ms: int = Field(
        default=60_000,
        ge=10,
        le=3_600_000,
        description="How often a safekeeper looks whether a manifest still names it, milliseconds.",
    )
    archive_unasked_ms: int = Field(
        default=30_000,
        ge=10,
        le=3_600_000,
        description="A safekeeper that was not appointed archives when a WAL object has been "
        "missing for so long, milliseconds; a second one after twice the time.",
    )
    archive_pause_ms: int = Field(
        default=20,
        ge=0,
        le=60_000,
        description="Least time between two looks of a safekeeper at what became complete in its "
        "own log, milliseconds.",
    )
    archive_read_bytes: int = Field(
        default=4 * MIB,
        ge=4 * KIB,
        le=1 * GIB,
        description="Bytes of a log that are read at once to find out which objects are complete.",
    )
