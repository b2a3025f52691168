"""Every setting, as values with units, limits and defaults.

Each model belongs to one component, which takes it as an argument. Flags, environment and files
are read in `shalekv.cli.configuration` alone; the reference in server/docs/settings.md is
generated from here. The names of fields differ between groups, since each is a flag.
"""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.cache import CacheSettings
from shalekv.settings.children import ChildrenSettings
from shalekv.settings.collector import CollectorSettings
from shalekv.settings.compactor import CompactorSettings
from shalekv.settings.levels import LevelCodec, LevelSettings
from shalekv.settings.limits import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.settings.memory import MemorySettings
from shalekv.settings.model import GIB, KIB, MIB, Settings
from shalekv.settings.reader import DiskCacheSettings, ReaderSettings, SnapshotChoice
from shalekv.settings.server import LogFormat, LogLevel, ProcessSettings, ServerSettings
from shalekv.settings.store import CasChoice, StoreSettings
from shalekv.settings.watches import WatchSettings
from shalekv.settings.writer import WalCodec, WriterSettings

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "STREAM_MESSAGE_BYTES_MAX",
    "CacheSettings",
    "CasChoice",
    "ChildrenSettings",
    "CollectSettings",
    "CollectorSettings",
    "CompactSettings",
    "CompactorSettings",
    "DatabaseSettings",
    "DiskCacheSettings",
    "EverySetting",
    "LevelCodec",
    "LevelSettings",
    "LimitSettings",
    "LogFormat",
    "LogLevel",
    "MemorySettings",
    "ProcessSettings",
    "ReadSettings",
    "ReaderSettings",
    "ServeSettings",
    "ServerSettings",
    "Settings",
    "SnapshotChoice",
    "StoreSettings",
    "UrlSettings",
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


class DatabaseSettings(UrlSettings):
    """Which database, and how it is opened."""

    create: bool = Field(
        default=False, description="Create the database if there is none at the URL."
    )


class ServeSettings(Settings):
    """Everything that `shalekv serve` needs, its compactor and collector included."""

    database: DatabaseSettings
    server: ServerSettings = ServerSettings()
    memory: MemorySettings = MemorySettings()
    writer: WriterSettings = WriterSettings()
    limits: LimitSettings = LimitSettings()
    cache: CacheSettings = CacheSettings()
    disk_cache: DiskCacheSettings = DiskCacheSettings()
    watches: WatchSettings = WatchSettings()
    levels: LevelSettings = LevelSettings()
    compactor: CompactorSettings = CompactorSettings()
    collector: CollectorSettings = CollectorSettings()
    children: ChildrenSettings = ChildrenSettings()
    store: StoreSettings = StoreSettings()


class ReadSettings(Settings):
    """Everything that `shalekv reader` needs."""

    database: UrlSettings
    server: ServerSettings = ServerSettings()
    memory: MemorySettings = MemorySettings()
    reader: ReaderSettings = ReaderSettings()
    limits: LimitSettings = LimitSettings()
    cache: CacheSettings = CacheSettings()
    disk_cache: DiskCacheSettings = DiskCacheSettings()
    watches: WatchSettings = WatchSettings()
    store: StoreSettings = StoreSettings()


class EverySetting(ServeSettings):
    """The settings of all roles: one file, and one environment, may have them for all."""

    reader: ReaderSettings = ReaderSettings()


class CompactSettings(Settings):
    """Everything that `shalekv compactor` needs."""

    database: UrlSettings
    server: ProcessSettings = ProcessSettings()
    levels: LevelSettings = LevelSettings()
    compactor: CompactorSettings = CompactorSettings()
    store: StoreSettings = StoreSettings()


class CollectSettings(Settings):
    """Everything that `shalekv collector` needs."""

    server: ProcessSettings = ProcessSettings()
    collector: CollectorSettings = CollectorSettings()
    store: StoreSettings = StoreSettings()
