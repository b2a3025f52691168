"""All settings, as models with units, limits and defaults.

`XSettings` is a group of settings of one component, which takes it as an argument; `XConfig` is all
groups of one command. Only `shalekv.cli.console.configuration` reads flags, the environment and
files; the reference in server/docs/settings.md is generated from these models. No two groups have a
field of the same name, since each field is a flag.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from shalekv.settings.jobs import CollectorSettings, CompactorSettings
from shalekv.settings.model import GIB, KIB, MIB, Settings
from shalekv.settings.roles import (
    CLOCK_JUMP_MAX_S,
    ArchivingSettings,
    DiskCacheSettings,
    QuorumSettings,
    ReaderSettings,
    SafekeeperSettings,
    SafekeeperTransport,
    SnapshotChoice,
    TailChoice,
    WalCodec,
    WriterSettings,
)
from shalekv.settings.security import AccessSettings, AuditKeys, AuditLevel, TlsSettings
from shalekv.settings.server import (
    PORT_MAX,
    STREAM_MESSAGE_BYTES_MAX,
    UNIX,
    ChildrenSettings,
    ElectionSettings,
    EndpointSettings,
    LimitSettings,
    LogFormat,
    LogLevel,
    MemorySettings,
    ProcessSettings,
    SafekeeperServerSettings,
    ServerSettings,
    WatchSettings,
    Wire,
)
from shalekv.settings.store import (
    CacheSettings,
    CasChoice,
    LevelCodec,
    LevelSettings,
    S3Reads,
    StoreSettings,
)
from shalekv.settings.telemetry import JobTelemetrySettings, PriceChoice, TelemetrySettings

__all__ = [
    "CLOCK_JUMP_MAX_S",
    "GIB",
    "KIB",
    "MIB",
    "STREAM_MESSAGE_BYTES_MAX",
    "UNIX",
    "AccessSettings",
    "AnyConfig",
    "ArchiveUrlSettings",
    "ArchivingSettings",
    "AuditKeys",
    "AuditLevel",
    "CacheSettings",
    "CasChoice",
    "ChildrenSettings",
    "CollectorConfig",
    "CollectorSettings",
    "CompactorConfig",
    "CompactorSettings",
    "DatabaseSettings",
    "DiskCacheSettings",
    "ElectionSettings",
    "EndpointSettings",
    "JobTelemetrySettings",
    "LevelCodec",
    "LevelSettings",
    "LimitSettings",
    "LogFormat",
    "LogLevel",
    "MemorySettings",
    "PriceChoice",
    "ProcessSettings",
    "QuorumSettings",
    "ReaderConfig",
    "ReaderSettings",
    "S3Reads",
    "SafekeeperConfig",
    "SafekeeperServerSettings",
    "SafekeeperSettings",
    "SafekeeperTransport",
    "ServerSettings",
    "Settings",
    "SnapshotChoice",
    "StoreSettings",
    "TailChoice",
    "TelemetrySettings",
    "TlsSettings",
    "UrlSettings",
    "WalChoice",
    "WalCodec",
    "WatchSettings",
    "Wire",
    "WriterConfig",
    "WriterSettings",
]


class UrlSettings(Settings):
    """The URL of a database."""

    url: str = Field(
        description="The database: s3://bucket/folder, gs://bucket/folder, "
        "az://container/folder, file:///path or memory://name.",
        json_schema_extra={"user": "everybody: names the database"},
    )


class WalChoice(StrEnum):
    """The place where writes are made durable."""

    OBJECT_STORE = "object-store"
    QUORUM = "quorum"


class DatabaseSettings(UrlSettings):
    """A database, and how it is opened."""

    create: bool = Field(
        default=False,
        description="Create the database if there is none at the URL.",
        json_schema_extra={"user": "operator of a new database"},
    )
    wal: WalChoice | None = Field(
        default=None,
        description="Where a write is made durable: in the object store, or on a majority of "
        "safekeepers, which archive it to the object store. A database keeps the mode that it was "
        "created with until it is switched; any other value is refused. Not set: the mode of the "
        "database; for a new database, object-store.",
        json_schema_extra={
            "user": "operator: latency of writes against machines with disks to run"
        },
    )
    safekeepers: str = Field(
        default="",
        description="The safekeepers of a database that is created with --wal quorum: "
        "HOST:PORT,HOST:PORT,HOST:PORT, as they are written to the manifest. For an existing "
        "database they must be those of the manifest, or not be given.",
        json_schema_extra={"user": "operator of a new quorum database"},
    )

    @property
    def safekeeper_addresses(self) -> tuple[str, ...]:
        """The addresses of the safekeepers."""
        return tuple(each.strip() for each in self.safekeepers.split(",") if each.strip())

    @model_validator(mode="after")
    def _safekeepers_have_addresses(self) -> DatabaseSettings:
        addresses = self.safekeeper_addresses
        if addresses and self.wal is not WalChoice.QUORUM:
            raise ValueError("safekeepers are for wal quorum only: give that, too")
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) <= PORT_MAX:
                raise ValueError(f"safekeepers must be HOST:PORT,HOST:PORT,..., not {address!r}")
        return self


class WriterConfig(Settings):
    """All settings of `shalekv serve`, including those of its compactor and collector."""

    database: DatabaseSettings
    server: ServerSettings = Field(default_factory=ServerSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    access: AccessSettings = Field(default_factory=AccessSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    writer: WriterSettings = Field(default_factory=WriterSettings)
    quorum: QuorumSettings = Field(default_factory=QuorumSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    disk_cache: DiskCacheSettings = Field(default_factory=DiskCacheSettings)
    watches: WatchSettings = Field(default_factory=WatchSettings)
    levels: LevelSettings = Field(default_factory=LevelSettings)
    compactor: CompactorSettings = Field(default_factory=CompactorSettings)
    collector: CollectorSettings = Field(default_factory=CollectorSettings)
    children: ChildrenSettings = Field(default_factory=ChildrenSettings)
    election: ElectionSettings = Field(default_factory=ElectionSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class ReaderConfig(Settings):
    """All settings of `shalekv reader`."""

    database: UrlSettings
    server: ServerSettings = Field(default_factory=ServerSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    access: AccessSettings = Field(default_factory=AccessSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    reader: ReaderSettings = Field(default_factory=ReaderSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    disk_cache: DiskCacheSettings = Field(default_factory=DiskCacheSettings)
    watches: WatchSettings = Field(default_factory=WatchSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class ArchiveUrlSettings(Settings):
    """The place of the databases of a safekeeper."""

    url: str = Field(
        description="The place at or below which the databases are whose logs this node keeps: "
        "s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///path. The node "
        "archives to no other place.",
        json_schema_extra={"user": "everybody: names the database"},
    )


class SafekeeperConfig(Settings):
    """All settings of `shalekv safekeeper`."""

    database: ArchiveUrlSettings
    server: SafekeeperServerSettings = Field(default_factory=SafekeeperServerSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    safekeeper: SafekeeperSettings = Field(default_factory=SafekeeperSettings)
    archiving: ArchivingSettings = Field(default_factory=ArchivingSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class AnyConfig(WriterConfig):
    """The settings of all roles, which one file or one environment may contain together."""

    reader: ReaderSettings = Field(default_factory=ReaderSettings)
    safekeeper: SafekeeperSettings = Field(default_factory=SafekeeperSettings)
    archiving: ArchivingSettings = Field(default_factory=ArchivingSettings)


class CompactorConfig(Settings):
    """All settings of `shalekv compactor`, except its databases."""

    server: ProcessSettings = Field(default_factory=ProcessSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    levels: LevelSettings = Field(default_factory=LevelSettings)
    compactor: CompactorSettings = Field(default_factory=CompactorSettings)
    telemetry: JobTelemetrySettings = Field(default_factory=JobTelemetrySettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class CollectorConfig(Settings):
    """All settings of `shalekv collector`, except its databases."""

    server: ProcessSettings = Field(default_factory=ProcessSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    collector: CollectorSettings = Field(default_factory=CollectorSettings)
    telemetry: JobTelemetrySettings = Field(default_factory=JobTelemetrySettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
