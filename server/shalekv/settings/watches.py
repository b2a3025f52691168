"""Settings of watches."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings


class WatchSettings(Settings):
    """Watches: how much may wait for slow clients, and how long the WAL is kept for absent ones."""

    watch_count_max: int = Field(
        default=100_000,
        ge=1,
        le=10_000_000,
        description="Most watches of one server. Past it a new one is refused with "
        "RESOURCE_EXHAUSTED.",
    )
    watch_stream_bytes_max: int = Field(
        default=4 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Bytes of replies of one stream that its client has not taken. Past it the "
        "watches of the stream are told nothing more from memory: they read the WAL from the "
        "store when there is room again.",
    )
    watch_bytes_max: int = Field(
        default=16 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="The same of all streams together.",
    )
    watch_progress_ms: int = Field(
        default=10_000,
        ge=10,
        le=3_600_000,
        description="How often a watch of which nothing was told is told how far the server has "
        "come, milliseconds.",
    )
    watch_stalled_ms: int = Field(
        default=60_000,
        ge=10,
        le=86_400_000,
        description="A stream whose client takes nothing for so long although something waits is "
        "cut: its watches are closed with ABORTED.",
    )
    consumer_lease_ttl_s: int = Field(
        default=86_400,
        ge=10,
        le=31_536_000,
        description="How long the WAL is kept for a named consumer that is away, seconds.",
    )
