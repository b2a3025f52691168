"""Settings of the writer: opening, group commit, back-pressure."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from shalekv.settings.model import GIB, KIB, MIB, Settings

CLOCK_JUMP_MAX_S = 3_600


class WalCodec(StrEnum):
    """How the blocks of WAL objects are compressed."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


class WriterSettings(Settings):
    """Opening, group commit and back-pressure of the writer."""

    max_parallel_writes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="WAL objects in flight at once, those with an unknown outcome included, and "
        "how far they may be apart in the log. A later writer must fence as many slots.",
    )
    flush_interval_ms: int | None = Field(
        default=None,
        ge=0,
        le=60_000,
        description="Minimum spacing of WAL objects in milliseconds. It caps the number of "
        "requests, not the latency of a first write: an idle log is flushed at once. Not set: 50 "
        "on stores that charge for requests, 0 on file:// and memory://.",
    )
    flush_bytes: int = Field(
        default=4 * MIB,
        ge=4 * KIB,
        le=256 * MIB,
        description="A WAL object is flushed without waiting for its spacing once this many bytes "
        "are queued, and takes no more than this unless one batch alone is larger.",
    )
    wal_block_bytes: int = Field(
        default=64 * KIB,
        ge=1 * KIB,
        le=16 * MIB,
        description="Target size of the blocks of a WAL object before compression.",
    )
    wal_codec: WalCodec = Field(
        default=WalCodec.NONE,
        description="How the blocks of WAL objects are compressed. Readers of version 0.1 refuse "
        "compressed blocks.",
    )
    queued_bytes_max: int = Field(
        default=32 * MIB,
        ge=1 * MIB,
        le=16 * GIB,
        description="Bytes of writes that are queued or being uploaded. Past it writes wait.",
    )
    waiting_bytes_max: int = Field(
        default=16 * MIB,
        ge=0,
        le=16 * GIB,
        description="Bytes of writes that wait for room. Past it writes are refused at once with "
        "RESOURCE_EXHAUSTED.",
    )
    queue_wait_ms: int = Field(
        default=1_000,
        ge=0,
        le=600_000,
        description="How long a write waits for room in the queue and in the memtable, before it "
        "is refused with RESOURCE_EXHAUSTED.",
    )
    memtable_bytes_max: int = Field(
        default=176 * MIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for writes that are not compacted yet, overhead included. Past it "
        "writes wait as for room in the queue, and one that is larger is refused at once.",
    )
    uncompacted_loads_max_count: int = Field(
        default=64,
        ge=1,
        le=500,
        description="Loads, large batches included, that are not compacted yet. Past it loads "
        "wait, as writes do for the memtable: each is one more place for a read to look into.",
    )
    retry_after_ms: int = Field(
        default=200,
        ge=1,
        le=600_000,
        description="The delay that a refused write is advised to wait.",
    )
    fence_poll_ms: int = Field(
        default=5_000,
        ge=10,
        le=3_600_000,
        description="How often a writer looks whether another has taken over, in milliseconds. At "
        "most open_timeout_ms.",
    )
    open_timeout_ms: int = Field(
        default=60_000,
        ge=1,
        le=3_600_000,
        description="How long opening tries to win the manifest before it gives up.",
    )
    open_once: bool = Field(
        default=False,
        description="Do not fence a writer that has opened the database since this process began "
        "to: end with exit code 8 instead. One that had opened it before is fenced, as without "
        "this. Not for servers with elect.",
    )
    clock_jump_max_s: int = Field(
        default=CLOCK_JUMP_MAX_S,
        ge=60,
        le=3_153_600_000,
        description="A database is opened only if the store's clock is so near to that of this "
        "machine, or to the time of the last commit, seconds. While it serves, the store's clock "
        "is followed over jumps up to this.",
    )
    open_snapshot_ttl_s: int = Field(
        default=600,
        ge=60,
        le=86_400,
        description="Life of the snapshot that protects the WAL while a writer opens, seconds. It "
        "is renewed when a third of it is over.",
    )
    snapshot_ttl_s: int = Field(
        default=300,
        ge=2,
        le=86_400,
        description="Life of the snapshots that protect what a serving process reads, seconds. "
        "They are renewed before half of it is over.",
    )
    memtable_segment_bytes: int = Field(
        default=8 * MIB,
        ge=64 * KIB,
        le=16 * GIB,
        description="The memtable is kept in parts of this size, overhead included, each of which "
        "is dropped when it is compacted.",
    )
    skip_memtable_bytes: int = Field(
        default=16 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="A batch above this size becomes SSTs of the levels at once, and passes "
        "neither through the WAL nor the memtable.",
    )
    idempotency_window_s: int = Field(
        default=86_400,
        ge=1,
        le=2_592_000,
        description="How long an idempotency key is remembered, in seconds of the store's clock.",
    )
    expiry_sweep_interval_ms: int = Field(
        default=1_000,
        ge=0,
        le=86_400_000,
        description="How often the removal of values that have expired is written, so that watches "
        "are told of it, milliseconds. It is one more change for each of them. 0: never; reads do "
        "not see them either way.",
    )
    expiry_tracked_bytes: int = Field(
        default=16 * MIB,
        ge=0,
        le=64 * GIB,
        description="Memory for what expires, some 400 bytes and the key of each value. Those that "
        "expire last and find no room are looked for in the levels.",
    )
    expiry_scan_interval_s: int = Field(
        default=600,
        ge=0,
        le=31_536_000,
        description="How often SSTs are looked through for values that have expired and were not "
        "kept in mind, seconds; each SST only if it may hold some. 0: never. Well below "
        "expired_kept_s, or compactions drop them before.",
    )
    expiry_scan_bytes: int = Field(
        default=8 * MIB,
        ge=64 * KIB,
        le=64 * GIB,
        description="Bytes of SSTs that are looked through in a second.",
    )
    replay_parallel_reads: int = Field(
        default=16, ge=1, le=256, description="WAL objects that are fetched at once by a replay."
    )

    @model_validator(mode="after")
    def _fences_are_noticed_in_time(self) -> Self:
        if self.fence_poll_ms > self.open_timeout_ms:
            raise ValueError(
                f"fence_poll_ms must be at most open_timeout_ms, {self.open_timeout_ms}, and not "
                f"{self.fence_poll_ms}: a writer that is taken over must notice it before its "
                "successor gives up"
            )
        return self


# --- quorum
# Settings of a writer whose log stands on safekeepers.


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
