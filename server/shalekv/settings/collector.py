"""Settings of the collector."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, Settings


class CollectorSettings(Settings):
    """Collection: how often, and how old what is deleted must be."""

    collect_interval_ms: int = Field(
        default=60_000,
        ge=10,
        le=86_400_000,
        description="How often the collector looks for objects that nothing needs, milliseconds.",
    )
    collect_age_s: int = Field(
        default=300,
        ge=0,
        le=31_536_000,
        description="An object that nothing needs is kept until it is this old, seconds by the "
        "store's clock.",
    )
    foreign_age_s: int = Field(
        default=86_400,
        ge=0,
        le=31_536_000,
        description="Files in manifest/, wal/ and levels/ that are no objects of ours, such as "
        "temporary ones, are deleted at this age, seconds.",
    )
    wal_retention_s: int = Field(
        default=3_600,
        ge=0,
        le=31_536_000,
        description="WAL objects that are compacted are kept until they are this old, seconds by "
        "the store's clock, so that a watch can begin with a commit of that time. 0: they go as "
        "all else does. Collectors of one database must agree on it.",
    )
    wal_retention_bytes: int = Field(
        default=1 * GIB,
        ge=0,
        le=1024 * GIB,
        description="Most bytes of compacted WAL objects that are kept for wal_retention_s: the "
        "newest of them.",
    )
    deletes_per_s_count: int = Field(
        default=1_000,
        ge=1,
        le=1_000_000,
        description="Most objects that are deleted in a second.",
    )
