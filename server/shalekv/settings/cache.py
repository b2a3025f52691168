"""Settings of reading the levels."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings


class CacheSettings(Settings):
    """Reading the levels: caches, and requests in flight."""

    block_cache_bytes: int = Field(
        default=88 * MIB,
        ge=0,
        le=1024 * GIB,
        description="Memory for blocks of the levels that were read.",
    )
    metadata_cache_bytes: int = Field(
        default=48 * MIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for the filters and indexes of the SSTs of the levels.",
    )
    read_in_flight_bytes: int = Field(
        default=32 * MIB,
        ge=1 * MIB,
        le=64 * GIB,
        description="Bytes of the levels that are being fetched at once, those of scans included. "
        "Past it reads wait.",
    )
    scan_ahead_bytes_max: int = Field(
        default=24 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory for what all scans together have read ahead of what they have told. "
        "Past it they read block by block.",
    )
    read_ahead_bytes_max: int = Field(
        default=1 * MIB,
        ge=4 * KIB,
        le=256 * MIB,
        description="What a long scan fetches at once of each sorted run. It begins with one "
        "block, and doubles.",
    )
