"""Where a database is, as driver and tasks know it: a value that travels, and opens the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import SystemRandom

from shalekv.clock import MachineClock
from shalekv.errors import InvalidSetting
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.store.url import MemoryUrl, parse_url
from shalekv_spark.arguments import settings_of
from shalekv_spark.logs import route_logs
from shalekv_spark.worker import settle

STORE_PREFIX = "store."  # of the options that are settings of the store
_THREADS = 2  # of a task; a file system is read in them


@dataclass(frozen=True, slots=True)
class Place:
    """The URL of a database, and the settings for requests to its store.

    Credentials are not among them: every process takes those from its own environment.
    """

    url: str
    settings: StoreSettings = field(default_factory=StoreSettings)

    @classmethod
    def of(cls, url: str, store: Mapping[str, object] | None = None) -> Place:
        """The place with these settings of the store, by their names in server/docs/settings.md.

        Raises `InvalidUrl` and `InvalidSetting`, before anything is asked of a store.
        """
        if isinstance(parse_url(url), MemoryUrl):
            raise InvalidSetting(f"{url}: Spark's processes cannot share what is in memory")
        return cls(url, settings_of(StoreSettings, store, prefix=STORE_PREFIX))

    @property
    def store_options(self) -> dict[str, str]:
        """The settings that are not the default, as options of a data source."""
        changed = self.settings.model_dump(mode="json", exclude_defaults=True)
        return {f"{STORE_PREFIX}{name}": str(value) for name, value in changed.items()}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[CasStore]:
        """The store, for this process and its event loop: it is never sent to another."""
        route_logs()
        workers = ThreadWorkers(_THREADS)
        runtime = Runtime(clock=MachineClock(), random=SystemRandom(), workers=workers)
        try:
            store = open_store(self.url, runtime, self.settings)
            settle()
            try:
                yield CasStore(store, runtime, self.settings)
            finally:
                await store.close()
        finally:
            workers.close()
