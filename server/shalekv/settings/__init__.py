"""Every setting, as values with units, limits and defaults.

Each model belongs to one component, which takes it as an argument. Flags, environment and files
are read in `shalekv.cli.console.configuration` alone; the reference in server/docs/settings.md is
generated from here. The names of fields differ between groups, since each is a flag.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from shalekv.settings.jobs import CollectorSettings, CompactorSettings
from shalekv.settings.model import GIB, KIB, MIB, Settings
from shalekv.settings.reader import (
    DiskCacheSettings,
    ReaderSettings,
    SnapshotChoice,
    TailChoice,
)
from shalekv.settings.safekeeper import ArchivingSettings, SafekeeperSettings
from shalekv.settings.server import (
    PORT_MAX,
    STREAM_MESSAGE_BYTES_MAX,
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
)
from shalekv.settings.store import (
    CacheSettings,
    CasChoice,
    LevelCodec,
    LevelSettings,
    StoreSettings,
)
from shalekv.settings.writer import (
    CLOCK_JUMP_MAX_S,
    QuorumSettings,
    SafekeeperTransport,
    WalCodec,
    WriterSettings,
)

__all__ = [
    "CLOCK_JUMP_MAX_S",
    "GIB",
    "KIB",
    "MIB",
    "STREAM_MESSAGE_BYTES_MAX",
    "ArchiveSettings",
    "ArchivingSettings",
    "CacheSettings",
    "CasChoice",
    "ChildrenSettings",
    "CollectSettings",
    "CollectorSettings",
    "CompactSettings",
    "CompactorSettings",
    "DatabaseSettings",
    "DiskCacheSettings",
    "ElectionSettings",
    "EndpointSettings",
    "EverySetting",
    "LevelCodec",
    "LevelSettings",
    "LimitSettings",
    "LogFormat",
    "LogLevel",
    "MemorySettings",
    "ProcessSettings",
    "QuorumSettings",
    "ReadSettings",
    "ReaderSettings",
    "SafekeepSettings",
    "SafekeeperServerSettings",
    "SafekeeperSettings",
    "SafekeeperTransport",
    "ServeSettings",
    "ServerSettings",
    "Settings",
    "SnapshotChoice",
    "StoreSettings",
    "TailChoice",
    "UrlSettings",
    "WalChoice",
    "WalCodec",
    "WatchSettings",
    "WriterSettings",
]


class UrlSettings(Settings):
    """Which database."""

    url: str = Field(
        description="The database: s3://bucket/folder, gs://bucket/folder, "
        "az://container/folder, file:///path or memory://name."
    )


class WalChoice(StrEnum):
    """Where a write is made durable."""

    OBJECT_STORE = "object-store"
    QUORUM = "quorum"


class DatabaseSettings(UrlSettings):
    """Which database, and how it is opened."""

    create: bool = Field(
        default=False, description="Create the database if there is none at the URL."
    )
    wal: WalChoice | None = Field(
        default=None,
        description="Where a write is made durable: in the object store, or on a majority of "
        "safekeepers, which archive it to the object store. A database keeps the mode that it was "
        "created with until it is switched; another one that is named here is refused. Not set: "
        "the mode of the database; of one that is created, object-store.",
    )
    safekeepers: str = Field(
        default="",
        description="The safekeepers of a database that is created with --wal quorum: "
        "HOST:PORT,HOST:PORT,HOST:PORT, as the manifest will name them. Of one that is there "
        "already they must be these, or not be named: the manifest has them.",
    )

    @property
    def safekeeper_addresses(self) -> tuple[str, ...]:
        """The addresses, each."""
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


class ServeSettings(Settings):
    """Everything that `shalekv serve` needs, its compactor and collector included."""

    database: DatabaseSettings
    server: ServerSettings = Field(default_factory=ServerSettings)
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
    store: StoreSettings = Field(default_factory=StoreSettings)


class ReadSettings(Settings):
    """Everything that `shalekv reader` needs."""

    database: UrlSettings
    server: ServerSettings = Field(default_factory=ServerSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    reader: ReaderSettings = Field(default_factory=ReaderSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    disk_cache: DiskCacheSettings = Field(default_factory=DiskCacheSettings)
    watches: WatchSettings = Field(default_factory=WatchSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class ArchiveSettings(Settings):
    """Where the databases are."""

    url: str = Field(
        description="Where the databases are whose logs this node keeps, at or below: "
        "s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///path. It "
        "archives nowhere else."
    )


class SafekeepSettings(Settings):
    """Everything that `shalekv safekeeper` needs."""

    database: ArchiveSettings
    server: SafekeeperServerSettings = Field(default_factory=SafekeeperServerSettings)
    safekeeper: SafekeeperSettings = Field(default_factory=SafekeeperSettings)
    archiving: ArchivingSettings = Field(default_factory=ArchivingSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class EverySetting(ServeSettings):
    """The settings of all roles: one file, and one environment, may have them for all."""

    reader: ReaderSettings = Field(default_factory=ReaderSettings)
    safekeeper: SafekeeperSettings = Field(default_factory=SafekeeperSettings)
    archiving: ArchivingSettings = Field(default_factory=ArchivingSettings)


class CompactSettings(Settings):
    """Everything that `shalekv compactor` needs but its databases."""

    server: ProcessSettings = Field(default_factory=ProcessSettings)
    levels: LevelSettings = Field(default_factory=LevelSettings)
    compactor: CompactorSettings = Field(default_factory=CompactorSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class CollectSettings(Settings):
    """Everything that `shalekv collector` needs but its databases."""

    server: ProcessSettings = Field(default_factory=ProcessSettings)
    collector: CollectorSettings = Field(default_factory=CollectorSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
