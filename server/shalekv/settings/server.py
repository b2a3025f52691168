"""Settings of the gRPC server and the process around it."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from shalekv.settings.model import GIB, KIB, MIB, Settings

PORT_MAX = 65_535


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


class ProcessSettings(Settings):
    """A process, whatever its role."""

    log_format: LogFormat = Field(default=LogFormat.CONSOLE, description="How log lines look.")
    log_level: LogLevel = Field(
        default=LogLevel.INFO, description="The least severe log lines that are shown."
    )


class EndpointSettings(ProcessSettings):
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
    debug_services: bool = Field(
        default=False,
        description="Serve grpc.channelz.v1.Channelz as well: the connections of this process, "
        "with the addresses of peers and counts of calls and messages, for whoever reaches the "
        "port. It shows no keys, values or metadata.",
    )

    @model_validator(mode="after")
    def _listen_has_a_port(self) -> Self:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > PORT_MAX:
            message = f"listen must be HOST:PORT with a port of 0 to 65535, not {self.listen!r}"
            raise ValueError(message)
        return self


class ServerSettings(EndpointSettings):
    """The gRPC server of a writer or a reader, and the process around it."""

    advertise: str = Field(
        default="",
        description="HOST:PORT under which clients reach this writer; stored in the manifest. "
        "Not set: the address it listens on. Readers have no use for it.",
    )


class SafekeeperServerSettings(EndpointSettings):
    """The gRPC server of a safekeeper, and the process around it."""

    listen: str = Field(
        default="127.0.0.1:7655",
        description="HOST:PORT to listen on; port 0 picks a free one. An address other than "
        "loopback needs --insecure.",
    )


# --- children
# Settings of the child processes of `serve`.


class ChildrenSettings(Settings):
    """The child processes of `serve`: its compactor and its collector."""

    with_compactor: bool = Field(
        default=True,
        description="Run a compactor of this database as a child process. Switch it off where "
        "another machine runs it. Never for memory://, which no other process can read.",
    )
    with_collector: bool = Field(
        default=True,
        description="Run a collector of this database as a child process. Never for memory://.",
    )
    child_restart_initial_ms: int = Field(
        default=500,
        ge=1,
        le=3_600_000,
        description="Delay before a child process that has ended is started again. It doubles "
        "with each end until the process has run for as long as the longest delay.",
    )
    child_restart_max_ms: int = Field(
        default=60_000,
        ge=1,
        le=86_400_000,
        description="Longest delay before a child process is started again.",
    )
    child_takeover_ms: int = Field(
        default=30_000,
        ge=50,
        le=86_400_000,
        description="A compactor that another one has taken over from is started again when writes "
        "have been held back for so long: then the other one does not compact.",
    )
    child_grace_ms: int = Field(
        default=5_000,
        ge=0,
        le=600_000,
        description="How long a shutdown waits for a child process that was told to end, before "
        "it sends SIGTERM; after a further such time it sends SIGKILL.",
    )


# --- memory
# Settings of the memory of a serving process.


class MemorySettings(Settings):
    """Memory of the serving process, divided in `settings.budget`."""

    memory_bytes: int = Field(
        default=512 * MIB,
        ge=16 * MIB,
        le=4096 * GIB,
        description="Memory of the serving process for data, beyond the 100 MiB or so that it "
        "takes idle: memtable, queues, caches and results. Settings that are not set share what "
        "those that are set leave of it.",
    )


# --- election
# Settings of the election of a writer.


class ElectionSettings(Settings):
    """Who tries to be the writer, where several processes stand by."""

    elect: str = Field(
        default="",
        description="Where a lease decides who tries to be the writer: bucket (of the database), "
        "etcd://HOST:PORT,HOST:PORT/name/of/the/key, or kubernetes://NAMESPACE/NAME of a Lease, "
        "where an empty NAMESPACE means that of the pod. Without the lease the server stands by. "
        "Not set: the server opens the database at once, and takes over from whoever has it.",
    )
    lease_ttl_ms: int = Field(
        default=3_000,
        ge=500,
        le=600_000,
        description="A lease that was not renewed for so long may be taken by another process. It "
        "is renewed each third of that. etcd and Kubernetes count whole seconds, and etcd has a "
        "least time of its own.",
    )
    kubernetes_credentials_path: str = Field(
        default="/var/run/secrets/kubernetes.io/serviceaccount",
        description="The folder with token, ca.crt and namespace of a service account, for "
        "--elect kubernetes://. Kubernetes mounts it into each pod; the files are read again when "
        "they change.",
    )


# --- limits
# Limits of requests.


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


# --- watches
# Settings of watches.


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
