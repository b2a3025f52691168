"""The place of a database: a value that Spark sends to driver and tasks, and that opens the store.

Here is also what each process of Spark needs around that: the routing of logs, and a setting of the
garbage collector.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from random import SystemRandom

import structlog
from structlog.typing import EventDict, ProcessorReturnValue, WrappedLogger

from shalekv.clock import MachineClock
from shalekv.errors import InvalidSetting
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.store.url import MemoryUrl, parse_url
from shalekv_spark.arguments import settings_of

_REUSED = "SPARK_REUSE_WORKER"  # in the environment of a worker that runs many tasks

_OWN = frozenset({"shalekv", "shalekv_client", "shalekv_spark", "shalekv_wire"})
_OF_LOGGING = ("timestamp", "level")  # which the handlers of `logging` add themselves

STORE_PREFIX = "store."  # of the options that are settings of the store
_THREADS = 2  # of a task, for blocking calls of a file system


@cache
def freeze_imports() -> None:
    """Exclude everything that was imported from garbage collections. To be called after imports.

    Does nothing in processes that Spark does not reuse, and when called again. Spark collects
    garbage in a worker after each task and each plan, and visiting all imported objects takes
    50 ms: as long as reading 30 MB.
    """
    if os.environ.get(_REUSED):
        gc.freeze()


def route_logs() -> None:
    """Send the logs of ShaleKV to `logging`, unless the program has configured structlog.

    The program that uses this library decides where its warnings go. The engine logs by structlog,
    which prints to stdout if it is not configured. Then the logs of ShaleKV's modules go to
    `logging`, under their names; logs of other modules are printed as before. The program may
    also configure structlog later.
    """
    if structlog.is_configured():
        return
    config = structlog.get_config()
    *steps, printed = config["processors"]
    print_logger = config["logger_factory"]
    of_module = structlog.stdlib.LoggerFactory(ignore_frame_names=[__name__])

    def logger(*arguments: object) -> WrappedLogger:
        found = of_module()
        return found if found.name.partition(".")[0] in _OWN else print_logger(*arguments)

    def rendered(logger: WrappedLogger, method: str, event: EventDict) -> ProcessorReturnValue:
        if isinstance(logger, logging.Logger):
            return _logging_arguments(event)
        shown: ProcessorReturnValue = printed(logger, method, event)
        return shown

    structlog.configure(processors=[*steps, rendered], logger_factory=logger)


def _logging_arguments(event: EventDict) -> tuple[tuple[str], dict[str, object]]:
    """Return the arguments for a logger of `logging`."""
    what, cause = event.pop("event"), event.pop("exc_info", None)
    fields = [f"{name}={value!r}" for name, value in event.items() if name not in _OF_LOGGING]
    return (": ".join([str(what), *([", ".join(fields)] if fields else [])]),), {"exc_info": cause}


@dataclass(frozen=True, slots=True)
class Place:
    """The URL of a database, and the settings for requests to its store.

    Credentials are not part of it: every process takes them from its own environment.
    """

    url: str
    settings: StoreSettings = field(default_factory=StoreSettings)

    @classmethod
    def of(cls, url: str, store: Mapping[str, object] | None = None) -> Place:
        """Return the place with these settings of the store, named as in server/docs/settings.md.

        Raises `InvalidUrl` and `InvalidSetting`, without a request to the store.
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
        """Open the store for this process and its event loop; it cannot be sent to another."""
        route_logs()
        workers = ThreadWorkers(_THREADS)
        runtime = Runtime(clock=MachineClock(), random=SystemRandom(), workers=workers)
        try:
            store = open_store(self.url, runtime, self.settings)
            freeze_imports()
            try:
                yield CasStore(store, runtime, self.settings)
            finally:
                await store.close()
        finally:
            workers.close()
