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
