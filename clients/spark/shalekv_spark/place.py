"""Where a database is, as driver and tasks know it: a value that travels, and opens the store."""

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

# --- worker
# What a process of Python needs that Spark starts once, and lets run many tasks.


_REUSED = "SPARK_REUSE_WORKER"  # of the environment that Spark gives to such a process


@cache
def settle() -> None:
    """Call when all is imported. Nothing happens in other processes, nor when called again.

    Spark collects garbage in the process after each task and each plan. What was imported stays,
    and 50 ms is what it takes to look at all of it: as much as to read 30 MB.
    """
    if os.environ.get(_REUSED):
        gc.freeze()


# --- logs
# Where warnings of this library go: a program that uses it decides that, and not stdout.
#
# The engine logs by structlog, which prints to stdout where nobody has configured it. Then what
# modules of ShaleKV log goes to `logging`, under their names; what others log is printed as
# before.


_OWN = frozenset({"shalekv", "shalekv_client", "shalekv_spark"})
_OF_LOGGING = ("timestamp", "level")  # its handlers tell them


def route_logs() -> None:
    """Route them, unless the program has configured structlog, which it also may do later."""
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
            return _told(event)
        shown: ProcessorReturnValue = printed(logger, method, event)
        return shown

    structlog.configure(processors=[*steps, rendered], logger_factory=logger)


def _told(event: EventDict) -> tuple[tuple[str], dict[str, object]]:
    """What a logger of `logging` is called with."""
    what, cause = event.pop("event"), event.pop("exc_info", None)
    fields = [f"{name}={value!r}" for name, value in event.items() if name not in _OF_LOGGING]
    return (": ".join([str(what), *([", ".join(fields)] if fields else [])]),), {"exc_info": cause}


# --- place


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
