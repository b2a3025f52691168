"""Limits of requests."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings

STREAM_MESSAGE_BYTES_MAX = 3_670_016  # 3.5 MiB: ordinary gRPC clients refuse more than 4 MiB


class LimitSettings(Settings):
    """Limits of requests."""

    value_bytes_max: int = Field(
        default=3 * MIB,
        ge=1,
        le=512 * MIB,
        description="Largest value, bytes. Values over 3 MiB need clients that accept messages "
        "over 4 MiB.",
    )
    batch_count_max: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Most changes in one Write, keys in one BatchGet, comparisons and operations "
        "in one Txn, and operations in one message of a Session.",
    )
    batch_bytes_max: int = Field(
        default=64 * MIB,
        ge=1 * KIB,
        le=1 * GIB,
        description="Most bytes of keys and values in one Write.",
    )
    delete_range_count_max: int = Field(
        default=100,
        ge=1,
        le=10_000,
        description="Most range deletes in one Write, or in one branch of a Txn.",
    )
    ttl_ms_max: int = Field(
        default=3_155_760_000_000,
        ge=1,
        le=2**62,
        description="Longest life that a put may give its value, milliseconds. The default is 100 "
        "years.",
    )
    compare_count_max: int = Field(
        default=10_000,
        ge=1,
        le=10_000_000,
        description="Most deleted or expired keys that a `range_empty` of a transaction looks at "
        "before it is refused. Nothing else runs meanwhile: 10,000 take some milliseconds.",
    )
    scan_view_count_max: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Views that are kept for page tokens. Past it the one that was used longest "
        "ago goes. A view keeps what was overwritten since then in memory.",
    )
    scan_view_ttl_ms: int = Field(
        default=60_000,
        ge=1,
        le=86_400_000,
        description="How long a view is kept for the next page of a scan, milliseconds.",
    )
    session_bytes_max: int = Field(
        default=8 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Bytes of unanswered operations, and of results that were not taken, of one "
        "session, overhead included. Past it the server reads no more of it.",
    )
    sessions_bytes_max: int = Field(
        default=16 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="The same of all sessions together. Past it each goes on with what is small.",
    )
    result_bytes_max: int = Field(
        default=24 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory for messages of scans that clients have not taken. The less is left, "
        "the smaller they are; a large value waits for room.",
    )
    result_wait_ms: int = Field(
        default=10_000,
        ge=0,
        le=600_000,
        description="How long a scan waits for room for a large value before it ends with "
        "RESOURCE_EXHAUSTED.",
    )
    result_stalled_ms: int = Field(
        default=5_000,
        ge=10,
        le=3_600_000,
        description="A scan or a session whose client has taken nothing for so long is ended with "
        "ABORTED when another one waits for the memory, the one that waits longest for its client "
        "first. It is given a second more for each MiB of its message. Should be well below "
        "result_wait_ms.",
    )
    scan_message_bytes: int = Field(
        default=256 * KIB,
        ge=1 * KIB,
        le=STREAM_MESSAGE_BYTES_MAX,
        description="Size at which a scan cuts its stream into messages, bytes. A larger entry "
        "stands alone. A client that takes one within result_stalled_ms is not too slow.",
    )
    seq_wait_ms_max: int = Field(
        default=30_000,
        ge=1,
        le=3_600_000,
        description="How long a read without a deadline waits for the commit of its `min_seq`, "
        "milliseconds.",
    )
    snapshot_ttl_s_max: int = Field(
        default=3_155_760_000,
        ge=1,
        le=2**52,
        description="Longest life that a call may give a snapshot, seconds. The default is 100 "
        "years; for ever is not bounded by it.",
    )
    snapshot_count_max: int = Field(
        default=1_000,
        ge=1,
        le=100_000,
        description="Most snapshots of the database, those of servers included, with which a call "
        "may create one more.",
    )
    snapshot_view_count_max: int = Field(
        default=32,
        ge=1,
        le=10_000,
        description="Snapshots whose state is kept ready for reads. Past it the one that was read "
        "longest ago goes, and is made ready again when it is read.",
    )
    snapshot_view_bytes_max: int = Field(
        default=16 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory for what these snapshots hold that was not compacted when they were "
        "made. A snapshot that holds more than this is read, but not kept.",
    )
