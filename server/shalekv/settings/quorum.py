"""Settings of a writer whose log stands on safekeepers."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shalekv.settings.model import GIB, KIB, MIB, Settings


class SafekeeperTransport(StrEnum):
    """Which way records take to the safekeepers."""

    DIRECT = "direct"
    CHAIN = "chain"


class QuorumSettings(Settings):
    """The write-ahead log in safekeepers: how they are asked, and what they archive."""

    safekeeper_connect_timeout_ms: int = Field(
        default=3_000,
        ge=10,
        le=600_000,
        description="How long a safekeeper may take to answer when it is called, milliseconds. "
        "Then it is called again.",
    )
    vote_timeout_ms: int = Field(
        default=15_000,
        ge=10,
        le=3_600_000,
        description="How long an opening waits for a majority of the safekeepers, at each of its "
        "steps, milliseconds. Then it fails, and names who has not answered.",
    )
    quorum_timeout_ms: int = Field(
        default=5_000,
        ge=10,
        le=3_600_000,
        description="How long a write waits for a majority, milliseconds. Then it ends with an "
        "unknown outcome, and writes are refused with UNAVAILABLE until a majority answers.",
    )
    reply_timeout_ms: int = Field(
        default=10_000,
        ge=10,
        le=3_600_000,
        description="A safekeeper that leaves a message without an answer for so long, "
        "milliseconds, is called anew.",
    )
    parallel_appends: int = Field(
        default=8,
        ge=1,
        le=1_024,
        description="Groups of writes that are on their way to the safekeepers at once. They "
        "become durable in their order.",
    )
    send_queue_bytes_max: int = Field(
        default=8 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Bytes of records that one safekeeper was sent and has not acknowledged. A "
        "slow one gets no more, and holds nobody up.",
    )
    safekeeper_transport: SafekeeperTransport = Field(
        default=SafekeeperTransport.DIRECT,
        description="Which way records take. direct: to every safekeeper from here. chain: to one "
        "of them, which passes them on to the next, and so on; each still answers here.",
    )
    chain_timeout_ms: int = Field(
        default=300,
        ge=1,
        le=600_000,
        description="A safekeeper of the chain that has acknowledged nothing for so long, although "
        "there is something, is sent records directly for a time, milliseconds.",
    )
    commit_broadcast: bool = Field(
        default=False,
        description="Let safekeepers tell each other how far the log is committed, too.",
    )
    held_log_bytes_max: int = Field(
        default=24 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory of the writer for records that are not in the archive yet. Past it "
        "writes wait, as they do for room in the queue.",
    )
    archive_interval_ms: int | None = Field(
        default=None,
        ge=0,
        le=3_600_000,
        description="Spacing of WAL objects in the archive, milliseconds: the writes of that time "
        "share one. No write waits for it. Not set: 250 on stores that charge for requests, 50 on "
        "file:// and memory://. 0: each group of writes is an object.",
    )
    archive_object_bytes: int = Field(
        default=8 * MIB,
        ge=4 * KIB,
        le=256 * MIB,
        description="A WAL object of the archive ends sooner when it would be larger than this.",
    )
    archive_takeover_ms: int = Field(
        default=5_000,
        ge=10,
        le=3_600_000,
        description="Another safekeeper is appointed to archive when the appointed one has "
        "archived nothing for so long although there was something, milliseconds.",
    )
