"""Every setting, as values with units, limits and defaults.

Each model belongs to one component, which takes it as an argument. Flags, environment and files
are read in `shalekv.cli.configuration` alone; the reference in server/docs/settings.md is
generated from here.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, model_validator

STREAM_MESSAGE_BYTES_MAX = 3_670_016  # 3.5 MiB: ordinary gRPC clients refuse more than 4 MiB
PORT_MAX = 65_535
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class Settings(BaseModel):
    """What all groups of settings share: they never change, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


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
        default=64 * MIB,
        ge=1 * MIB,
        le=16 * GIB,
        description="Bytes of writes that are queued or being uploaded. Past it writes wait.",
    )
    waiting_bytes_max: int = Field(
        default=64 * MIB,
        ge=0,
        le=16 * GIB,
        description="Bytes of writes that wait for room in the queue. Past it writes are refused "
        "at once with RESOURCE_EXHAUSTED.",
    )
    queue_wait_ms: int = Field(
        default=1_000,
        ge=0,
        le=600_000,
        description="How long a write waits for room in the queue before it is refused with "
        "RESOURCE_EXHAUSTED.",
    )
    memtable_bytes_max: int = Field(
        default=1 * GIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Memory for writes that are not compacted yet, overhead included. Past it "
        "writes are refused with RESOURCE_EXHAUSTED.",
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
        description="How often a writer looks whether another has taken over, in milliseconds.",
    )
    open_timeout_ms: int = Field(
        default=60_000,
        ge=1,
        le=3_600_000,
        description="How long opening tries to win the manifest before it gives up.",
    )
    open_snapshot_ttl_s: int = Field(
        default=600,
        ge=60,
        le=86_400,
        description="Life of the snapshot that protects the WAL while a writer opens, seconds.",
    )
    idempotency_window_s: int = Field(
        default=86_400,
        ge=1,
        le=2_592_000,
        description="How long an idempotency key is remembered, in seconds of the store's clock.",
    )
    replay_parallel_reads: int = Field(
        default=16, ge=1, le=256, description="WAL objects that are fetched at once by a replay."
    )


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
    scan_message_bytes: int = Field(
        default=1 * MIB,
        ge=1 * KIB,
        le=STREAM_MESSAGE_BYTES_MAX,
        description="Size at which a scan cuts its stream into messages, bytes. A larger entry "
        "stands alone.",
    )


class StoreSettings(Settings):
    """Requests to the object store."""

    retry_initial_ms: int = Field(
        default=50, ge=1, le=60_000, description="First delay before a request is repeated."
    )
    retry_max_ms: int = Field(
        default=2_000, ge=1, le=600_000, description="Longest delay between repeated requests."
    )
    read_attempts: int = Field(
        default=8,
        ge=1,
        le=1_000,
        description="How often a read or a list is sent before its error is reported.",
    )
    threads: int = Field(
        default=8, ge=1, le=256, description="Threads for calls that block, such as file I/O."
    )


class LogFormat(StrEnum):
    """How log lines look."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe log lines that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ServerSettings(Settings):
    """The gRPC server and the process around it."""

    listen: str = Field(
        default="127.0.0.1:7654",
        description="HOST:PORT to listen on; port 0 picks a free one. An address other than "
        "loopback needs --insecure.",
    )
    insecure: bool = Field(
        default=False,
        description="Allow an address other than loopback although the connection is neither "
        "encrypted nor authenticated.",
    )
    advertise: str = Field(
        default="",
        description="HOST:PORT under which clients reach this writer; stored in the manifest. "
        "Not set: the address it listens on.",
    )
    log_format: LogFormat = Field(default=LogFormat.CONSOLE, description="How log lines look.")
    log_level: LogLevel = Field(
        default=LogLevel.INFO, description="The least severe log lines that are shown."
    )
    shutdown_grace_ms: int = Field(
        default=10_000,
        ge=0,
        le=600_000,
        description="How long a graceful shutdown waits for calls and uploads.",
    )
    concurrent_calls_max: int = Field(
        default=2_000,
        ge=1,
        le=1_000_000,
        description="Calls in progress; more are refused with RESOURCE_EXHAUSTED.",
    )
    concurrent_streams_max: int = Field(
        default=256, ge=1, le=100_000, description="Calls in progress on one connection."
    )
    message_bytes_max: int = Field(
        default=68 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Largest message that the server accepts, bytes.",
    )
    metadata_bytes_max: int = Field(
        default=16 * KIB, ge=1 * KIB, le=1 * MIB, description="Largest metadata of a call, bytes."
    )
    handshake_timeout_ms: int = Field(
        default=10_000,
        ge=100,
        le=600_000,
        description="A connection that does not speak HTTP/2 by then is closed.",
    )
    connection_idle_ms: int = Field(
        default=300_000,
        ge=1_000,
        le=86_400_000,
        description="A connection without calls for this long is closed.",
    )
    connection_age_ms: int = Field(
        default=3_600_000,
        ge=1_000,
        le=86_400_000,
        description="A connection is asked to reconnect after this long.",
    )
    connection_age_grace_ms: int = Field(
        default=30_000,
        ge=0,
        le=3_600_000,
        description="How long calls may go on after their connection was asked to reconnect.",
    )
    ping_interval_min_ms: int = Field(
        default=20_000,
        ge=1_000,
        le=3_600_000,
        description="Clients that ping more often without data are sent away.",
    )

    @model_validator(mode="after")
    def _listen_has_a_port(self) -> ServerSettings:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > PORT_MAX:
            message = f"listen must be HOST:PORT with a port of 0 to 65535, not {self.listen!r}"
            raise ValueError(message)
        return self


class DatabaseSettings(Settings):
    """Which database, and how it is opened."""

    url: str = Field(
        description="The database: file:///path or memory://name. s3://, gs:// and az:// are "
        "refused by this version."
    )
    create: bool = Field(
        default=False, description="Create the database if there is none at the URL."
    )


class ServeSettings(Settings):
    """Everything that `shalekv serve` needs."""

    database: DatabaseSettings
    server: ServerSettings = ServerSettings()
    writer: WriterSettings = WriterSettings()
    limits: LimitSettings = LimitSettings()
    store: StoreSettings = StoreSettings()
