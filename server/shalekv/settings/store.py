"""Settings of the object store, of reading the levels, and of the SSTs in the levels."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from shalekv.settings.model import GIB, KIB, MIB, Settings


class CasChoice(StrEnum):
    """The authority that decides which of two creates of one name wins."""

    NATIVE = "native"
    TWO_PHASE = "two_phase"


class S3Reads(StrEnum):
    """The program part that reads parts of objects from S3."""

    DIRECT = "direct"
    BOTOCORE = "botocore"


class StoreSettings(Settings):
    """The place of the object store, and requests to it."""

    endpoint_url: str = Field(
        default="",
        description="URL of a server with the protocol of S3, Google or Azure: https://HOST:PORT. "
        "Not set: that of the provider.",
        json_schema_extra={"user": "operator of another provider or a proxy"},
    )
    region: str = Field(
        default="",
        description="Region of an s3:// bucket. Not set: that of AWS_REGION or AWS's files, else "
        "us-east-1.",
        json_schema_extra={"user": "operator of the bucket"},
    )
    aws_profile: str = Field(
        default="",
        description="Profile of AWS's files whose credentials are used for s3:// and DynamoDB. "
        "Not set: those of the environment, else the profile that AWS_PROFILE names.",
        json_schema_extra={"user": "operator with several accounts"},
    )
    path_style: bool = Field(
        default=False,
        description="Put the bucket of s3:// into the path of requests and not into the host name. "
        "That is also done when endpoint_url is set, except at Tigris.",
        json_schema_extra={"user": "operator of a store without host names for buckets"},
    )
    anonymous: bool = Field(
        default=False,
        description="Send requests without credentials, to stores that need none.",
        json_schema_extra={"user": "reader of a public bucket"},
    )
    cas: CasChoice = Field(
        default=CasChoice.NATIVE,
        description="How it is decided which of two creates of one name wins: by conditional "
        "writes of the store, or, for a store that has none, by the transactional store of "
        "records_url. It must not change for a database. If records_url is set and this is not: "
        "two_phase.",
        json_schema_extra={"user": "operator of a store without conditional writes"},
    )
    records_url: str = Field(
        default="",
        description="The transactional store of two_phase: dynamodb://TABLE, sqlite:///FILE, "
        "mysql://USER:PASSWORD@HOST/DATABASE or postgresql://USER:PASSWORD@HOST/DATABASE. It is a "
        "secret when it holds a password: then give it in the environment or in a file.",
        json_schema_extra={
            "secret": True,
            "user": "operator of a store without conditional writes",
        },
        repr=False,
    )
    records_endpoint_url: str = Field(
        default="",
        description="URL of a server with DynamoDB's protocol: https://HOST:PORT. Not set: "
        "Amazon's.",
        json_schema_extra={"user": "operator of another server with this protocol"},
    )
    connections_max: int = Field(
        default=32,
        ge=1,
        le=1_000,
        description="Most connections to the object store.",
        json_schema_extra={"user": "operator sizing the network"},
    )
    request_timeout_ms: int = Field(
        default=30_000,
        ge=10,
        le=3_600_000,
        description="How long the object store may be silent in a request before the request "
        "fails, milliseconds.",
        json_schema_extra={"user": "operator of a store that is slow"},
    )
    s3_reads: S3Reads = Field(
        default=S3Reads.DIRECT,
        description="How parts of SSTs are read from s3://. direct: by requests of our own, which "
        "take a fifth of the CPU of botocore's, and go where its first one went. botocore: by "
        "botocore, as all other requests.",
        json_schema_extra={"user": "operator of a server or proxy that refuses direct reads"},
    )
    multipart_bytes: int = Field(
        default=64 * MIB,
        ge=5 * MIB,
        le=5 * GIB,
        description="Size above which SSTs of the levels are uploaded in parts, bytes.",
        json_schema_extra={
            "user": "operator of a store that takes no uploads in parts, or only small requests"
        },
    )
    read_attempts: int = Field(
        default=8,
        ge=1,
        le=1_000,
        description="How often a read or a list is sent before its error is reported.",
        json_schema_extra={
            "user": "operator: an early error against outages that should pass unnoticed"
        },
    )
    threads: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Threads for blocking calls, such as file I/O; for each database if a process "
        "has several.",
        json_schema_extra={"user": "operator sizing CPU and slow disks"},
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_by_records(cls, given: Any) -> Any:
        """Choose two_phase if `records_url` is set and `cas` is not: it has no other use."""
        if isinstance(given, dict) and given.get("records_url") and "cas" not in given:
            return {**given, "cas": CasChoice.TWO_PHASE}
        return given


class CacheSettings(Settings):
    """Reading the levels: caches, reads in flight, and reading ahead."""

    block_cache_bytes: int = Field(
        default=88 * MIB,
        ge=0,
        le=1024 * GIB,
        description="Memory for blocks of the levels that were read.",
        json_schema_extra={"user": "operator sizing memory for reads"},
    )
    metadata_cache_bytes: int = Field(
        default=48 * MIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for the filters and indexes of the SSTs of the levels.",
        json_schema_extra={"user": "operator sizing memory for reads"},
    )
    read_in_flight_bytes: int = Field(
        default=32 * MIB,
        ge=1 * MIB,
        le=64 * GIB,
        description="Most bytes of the levels that are fetched at once, those of scans included. "
        "Beyond it reads wait.",
        json_schema_extra={"user": "operator: memory against throughput on a fast network"},
    )
    scan_ahead_bytes_max: int = Field(
        default=24 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory for what all scans together have read ahead of what they have sent. "
        "Beyond it they read block by block.",
        json_schema_extra={"user": "operator: memory against throughput of scans"},
    )


class LevelCodec(StrEnum):
    """The compression of the blocks of the levels."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


class LevelSettings(Settings):
    """The SSTs of the levels, as the compactor and large batches write them."""

    sst_bytes: int = Field(
        default=32 * MIB,
        ge=64 * KIB,
        le=4 * GIB,
        description="Target size of an SST of the levels; at most half of "
        "subcompaction_memory_bytes.",
        json_schema_extra={"user": "operator: number of objects against the work of one merge"},
    )
    block_bytes: int = Field(
        default=16 * KIB,
        ge=1 * KIB,
        le=16 * MIB,
        description="Target size of the blocks of the levels before compression. A read that "
        "misses the cache fetches one.",
        json_schema_extra={
            "user": "operator: reads of single keys against scans and memory of indexes"
        },
    )
    codec: LevelCodec = Field(
        default=LevelCodec.LZ4,
        description="Compression of the blocks of the levels.",
        json_schema_extra={"user": "operator: storage and network against CPU"},
    )
    filter_bits: int = Field(
        default=16,
        ge=0,
        le=32,
        description="Bits of the filter for each key; with 16, the filter passes about 1 in 700 "
        "keys that are not there. 0: no filters.",
        json_schema_extra={"user": "operator: memory against reads for keys that are not there"},
    )
