"""Settings of how a safekeeper brings its logs into the archive."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings


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
