"""Settings of the objects in the levels."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings


class LevelCodec(StrEnum):
    """How the blocks of the levels are compressed."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


class LevelSettings(Settings):
    """The SSTs of the levels, as compactor and ingest write them."""

    sst_bytes: int = Field(
        default=32 * MIB,
        ge=64 * KIB,
        le=4 * GIB,
        description="Target size of an SST of the levels; at most half of "
        "subcompaction_memory_bytes.",
    )
    block_bytes: int = Field(
        default=16 * KIB,
        ge=1 * KIB,
        le=16 * MIB,
        description="Target size of the blocks of the levels before compression: what a read that "
        "finds nothing in the cache fetches.",
    )
    codec: LevelCodec = Field(
        default=LevelCodec.LZ4, description="How the blocks of the levels are compressed."
    )
    filter_bits: int = Field(
        default=16,
        ge=0,
        le=32,
        description="Bits of the filter for each key; 16 let about 1 key in 700 through that is "
        "not there. 0: no filters.",
    )
