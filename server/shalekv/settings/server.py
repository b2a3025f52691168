"""Settings of the serving processes: gRPC server, child processes, memory, election and limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from shalekv.settings.model import GIB, KIB, MIB, Settings

PORT_MAX = 65_535
UNIX = "unix:"  # before the path of a socket

STREAM_MESSAGE_BYTES_MAX = 3_670_016  # 3.5 MiB: ordinary gRPC clients refuse more than 4 MiB
SESSION_BYTES_MAX = 8 * MIB  # more is of no use to one session


class LogFormat(StrEnum):
    """The format of log lines."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe log lines that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Wire(StrEnum):
    """The transport of gRPC calls."""

    NATIVE = "native"
    GRPCIO = "grpcio"


class ProcessSettings(Settings):
    """A process of any role."""

    log_format: LogFormat = Field(
        default=LogFormat.CONSOLE,
        description="Format of log lines.",
        json_schema_extra={"user": "operator: json where a program reads the logs"},
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="The least severe log lines that are shown.",
        json_schema_extra={"user": "operator: debug when something is searched for"},
    )
    insecure: bool = Field(
        default=False,
        description="Allow an address other than loopback without TLS, although connections are "
        "neither encrypted nor authenticated; for a safekeeper, also without --tls-client-ca.",
        json_schema_extra={"user": "security: nothing listens on a network by accident"},
    )


class EndpointSettings(ProcessSettings):
    """The gRPC server and the process around it."""

    listen: str = Field(
        default="127.0.0.1:7654",
        description="HOST:PORT to listen on, or unix:PATH; port 0 picks a free one. An address "
        "other than loopback needs --tls-cert, or --insecure.",
        json_schema_extra={"user": "operator: the address and port of this machine"},
    )
    wire: Wire = Field(
        default=Wire.NATIVE,
        description="The implementation of gRPC: the one of ShaleKV, or grpcio, which takes "
        "several times as much CPU for a call and is the fallback.",
        json_schema_extra={"user": "operator whose clients or proxies fail with the default"},
    )
    shutdown_grace_ms: int = Field(
        default=10_000,
        ge=0,
        le=600_000,
        description="How long a graceful shutdown waits for calls and uploads, milliseconds.",
        json_schema_extra={
            "user": "operator: must end before the supervisor of the process kills it"
        },
    )
    concurrent_calls_max: int = Field(
        default=2_000,
        ge=1,
        le=1_000_000,
        description="Most calls in progress; more are refused with RESOURCE_EXHAUSTED.",
        json_schema_extra={"user": "operator sizing memory and threads for many clients"},
    )
    message_bytes_max: int = Field(
        default=68 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Largest message that the server accepts, bytes.",
        json_schema_extra={"user": "operator who allows larger values or batches"},
    )
    connection_age_ms: int = Field(
        default=3_600_000,
        ge=1_000,
        le=86_400_000,
        description="Age at which a connection is asked to reconnect, milliseconds.",
        json_schema_extra={
            "user": "operator behind a load balancer: how soon clients move to a new server"
        },
    )
    debug_services: bool = Field(
        default=False,
        description="Serve grpc.channelz.v1.Channelz as well: the connections of this process, "
        "with the addresses of peers and counts of calls and messages, to every client that "
        "reaches the port; to none while an access policy is enforced. It shows no keys, values or "
        "metadata. Needs --wire grpcio.",
        json_schema_extra={"user": "operator who examines connections; off for security"},
    )

    @model_validator(mode="after")
    def _listen_has_a_port(self) -> Self:
        host, _, port = self.listen.rpartition(":")
        if self.listen.startswith(UNIX):
            if self.listen == UNIX:
                raise ValueError("listen must be unix:PATH, and has no path")
        elif not host or not port.isdigit() or int(port) > PORT_MAX:
            message = f"listen must be HOST:PORT with a port of 0 to 65535, not {self.listen!r}"
            raise ValueError(message)
        return self


class ServerSettings(EndpointSettings):
    """The gRPC server of a writer or a reader, and the process around it."""

    advertise: str = Field(
        default="",
        description="HOST:PORT at which clients reach this writer; stored in the manifest. Not "
        "set: the address it listens on. Readers ignore it.",
        json_schema_extra={"user": "operator behind NAT, a container network or a service name"},
    )


class SafekeeperServerSettings(EndpointSettings):
    """The gRPC server of a safekeeper, and the process around it."""

    listen: str = Field(
        default="127.0.0.1:7655",
        description="HOST:PORT to listen on, or unix:PATH; port 0 picks a free one. An address "
        "other than loopback needs --tls-client-ca, or --insecure.",
        json_schema_extra={"user": "operator: the address and port of this machine"},
    )


class ChildrenSettings(Settings):
    """The child processes of `serve`: its compactor and its collector."""

    with_compactor: bool = Field(
        default=True,
        description="Run a compactor of this database as a child process. Switch it off if "
        "another machine runs it. Never run for memory://, which no other process can read.",
        json_schema_extra={"user": "operator who runs the compactor on another machine"},
    )
    with_collector: bool = Field(
        default=True,
        description="Run a collector of this database as a child process. Never run for memory://.",
        json_schema_extra={"user": "operator who runs the collector on another machine"},
    )


class MemorySettings(Settings):
    """Memory of the serving process, which `settings.budget` divides."""

    memory_bytes: int = Field(
        default=512 * MIB,
        ge=16 * MIB,
        le=4096 * GIB,
        description="Memory of the serving process for data, beyond the 100 MiB or so that it "
        "takes idle: memtable, queues, caches and results. The parts that are not set share what "
        "the others leave of it.",
        json_schema_extra={"user": "operator sizing memory"},
    )


class ElectionSettings(Settings):
    """Election of the writer among several processes."""

    elect: str = Field(
        default="",
        description="The place of the lease that decides which process tries to be the writer: "
        "bucket (of the database), etcd://HOST:PORT,HOST:PORT/name/of/the/key, the same with "
        "etcds:// for TLS, or kubernetes://NAMESPACE/NAME of a Lease, where an empty NAMESPACE "
        "means that of the pod. A server without the lease stands by. Not set: the server opens "
        "the database at once, and takes over from any other writer.",
        json_schema_extra={"user": "operator of several servers for one database"},
    )
    lease_ttl_ms: int = Field(
        default=3_000,
        ge=500,
        le=600_000,
        description="Time after which another process may take a lease that was not renewed, "
        "milliseconds. It is renewed after each third of that. etcd and Kubernetes count whole "
        "seconds, and etcd has a least time of its own.",
        json_schema_extra={"user": "operator: time of a failover against failovers without need"},
    )
    kubernetes_credentials_path: str = Field(
        default="/var/run/secrets/kubernetes.io/serviceaccount",
        description="The folder with token, ca.crt and namespace of a service account, for "
        "--elect kubernetes://. Kubernetes mounts it into each pod; the files are read again when "
        "they change.",
        json_schema_extra={"user": "operator whose service account is mounted elsewhere"},
    )


class LimitSettings(Settings):
    """Limits of requests."""

    value_bytes_max: int = Field(
        default=3 * MIB,
        ge=1,
        le=512 * MIB,
        description="Largest value, bytes. Values over 3 MiB need clients that accept messages "
        "over 4 MiB.",
        json_schema_extra={"user": "operator: larger values need more memory and other clients"},
    )
    batch_count_max: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Most changes in one Write, keys in one BatchGet, comparisons and operations "
        "in one Txn, and operations in one message of a Session.",
        json_schema_extra={"user": "operator: longest work that one call may cause"},
    )
    batch_bytes_max: int = Field(
        default=64 * MIB,
        ge=1 * KIB,
        le=1 * GIB,
        description="Most bytes of keys and values in one Write.",
        json_schema_extra={"user": "operator sizing memory"},
    )
    ttl_ms_max: int = Field(
        default=3_155_760_000_000,
        ge=1,
        le=2**62,
        description="Longest time to live that a put may give its value, milliseconds. The default "
        "is 100 years.",
        json_schema_extra={"user": "operator whose data must not outlive a time"},
    )
    scan_view_count_max: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Most views that are kept for page tokens. Beyond it the least recently used "
        "one is dropped. A view keeps in memory what was overwritten since it was made.",
        json_schema_extra={"user": "operator sizing memory for paged scans"},
    )
    scan_view_ttl_ms: int = Field(
        default=60_000,
        ge=1,
        le=86_400_000,
        description="How long a view is kept for the next page of a scan, milliseconds.",
        json_schema_extra={"user": "operator: memory and storage against slow pagination"},
    )
    sessions_bytes_max: int = Field(
        default=16 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Most bytes of all sessions in unanswered operations and in results that were "
        "not taken, overhead included. Beyond it each session continues with small amounts. A "
        "session that holds more than half of it, or more than 8 MiB, is not read meanwhile.",
        json_schema_extra={"user": "operator sizing memory"},
    )
    result_bytes_max: int = Field(
        default=24 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory for messages of scans that clients have not taken. The less is free, "
        "the smaller the messages are; a large value waits until it fits.",
        json_schema_extra={"user": "operator sizing memory"},
    )
    result_stalled_ms: int = Field(
        default=5_000,
        ge=10,
        le=3_600_000,
        description="When others wait for the memory, scans and sessions whose client has taken "
        "nothing for so long are ended with ABORTED, milliseconds; the one that has waited longest "
        "for its client first. The time is a second longer for each MiB of the message. A scan "
        "waits for memory for 10 seconds, or twice this time if that is longer, and then ends with "
        "RESOURCE_EXHAUSTED.",
        json_schema_extra={"user": "operator of clients on slow links"},
    )
    scan_message_bytes: int = Field(
        default=256 * KIB,
        ge=1 * KIB,
        le=STREAM_MESSAGE_BYTES_MAX,
        description="Target size of the messages of a scan, bytes. A larger entry has a message of "
        "its own. A client that takes one message within result_stalled_ms is not too slow.",
        json_schema_extra={"user": "operator of clients on slow links"},
    )
    snapshot_ttl_s_max: int = Field(
        default=3_155_760_000,
        ge=1,
        le=2**52,
        description="Longest time to live that a call may give a snapshot, seconds. The default is "
        "100 years. Snapshots that never expire are allowed.",
        json_schema_extra={"user": "operator: storage that forgotten snapshots keep"},
    )
    snapshot_count_max: int = Field(
        default=1_000,
        ge=1,
        le=100_000,
        description="Most snapshots of the database, those of servers included. At that number, "
        "calls that create one are refused.",
        json_schema_extra={
            "user": "operator: size of the manifest and storage that snapshots keep"
        },
    )
    snapshot_view_bytes_max: int = Field(
        default=16 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory for keeping snapshots open for reads: for the writes of each that were "
        "not compacted when it was created. One with more than this is read, but not kept open.",
        json_schema_extra={"user": "operator sizing memory"},
    )

    @property
    def session_bytes_max(self) -> int:
        """The bytes of `sessions_bytes_max` beyond which one session is not read."""
        return min(self.sessions_bytes_max // 2, SESSION_BYTES_MAX)


class WatchSettings(Settings):
    """Watches: buffers for slow clients, and the WAL that is kept for absent consumers."""

    watch_bytes_max: int = Field(
        default=16 * MIB,
        ge=256 * KIB,
        le=64 * GIB,
        description="Memory for replies of watches that clients have not taken, of all streams "
        "together. One stream may hold a quarter of it, and at most 4 MiB.",
        json_schema_extra={"user": "operator sizing memory for slow watchers"},
    )
    watch_progress_ms: int = Field(
        default=10_000,
        ge=10,
        le=3_600_000,
        description="Interval between progress notifications on an idle watch, milliseconds.",
        json_schema_extra={
            "user": "operator: traffic of idle watches against how soon clients notice an outage"
        },
    )
    consumer_lease_ttl_s: int = Field(
        default=86_400,
        ge=10,
        le=31_536_000,
        description="How long the WAL is kept for a named consumer that is not connected, seconds.",
        json_schema_extra={"user": "operator: storage against how long a consumer may be away"},
    )
