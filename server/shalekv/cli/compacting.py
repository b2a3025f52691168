"""The life of `shalekv compactor`: take over, compact until asked to stop, give up the leases."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import SystemRandom

import structlog

from shalekv.cli.child_reports import telling_parent
from shalekv.cli.compactor_parts import ProcessParts
from shalekv.cli.parent_pipe import parent_pipe
from shalekv.cli.stopping import StopRequest
from shalekv.clock import MachineClock
from shalekv.engine.compaction.parts import OwnProcessParts, PartRunner
from shalekv.errors import Stopping, StoreError
from shalekv.roles.compactor import Compactor
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import CompactSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.store.url import MemoryUrl, parse_url

CLOSE_S = 5  # leases that are not given up by then expire

log = structlog.get_logger(__name__)


async def compact_database(
    settings: CompactSettings, *, is_once: bool = False, has_parent_pipe: bool = False
) -> None:
    """Compact until a signal or the parent asks to stop, or with `is_once` until nothing is due.

    Raises `Superseded`, and whatever else ends a compactor.
    """
    hurry = asyncio.Event()
    with StopRequest() as stop:
        async with AsyncExitStack() as stack:
            if has_parent_pipe:
                await stack.enter_async_context(parent_pipe(stop.asked, hurry))
            runtime = await stack.enter_async_context(_runtime(settings))
            store = open_store(settings.database.url, runtime, settings.store)
            stack.push_async_callback(store.close)
            if has_parent_pipe:
                stack.enter_context(telling_parent([store.sent]))
            async with _until(stop.asked):
                compactor = await Compactor.open(
                    store,
                    settings=settings,
                    runtime=runtime,
                    hurry=hurry,
                    parts=_parts(store, settings, runtime),
                    holder=_holder(),
                )
                try:
                    await compactor.run(is_once=is_once)
                finally:
                    await _close(compactor)
    log.info("stopped", requests=store.sent.total)


@asynccontextmanager
async def _until(asked: asyncio.Event) -> AsyncIterator[None]:
    """What is awaited inside is cancelled by a request to stop, and nothing is raised."""
    task = asyncio.current_task()
    assert task is not None

    async def cancel() -> None:
        await asked.wait()
        task.cancel()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(cancel())
        failure: Exception | None = None
        try:
            yield
        except asyncio.CancelledError:
            if not asked.is_set():
                raise
            task.uncancel()
        except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
            failure = error
        finally:
            watching.cancel()
    if failure is not None:
        raise failure


async def _close(compactor: Compactor) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await compactor.close()
    except (Stopping, StoreError, TimeoutError) as error:
        log.debug("leases are left to expire", problem=str(error))


@asynccontextmanager
async def _runtime(settings: CompactSettings) -> AsyncIterator[Runtime]:
    workers = ThreadWorkers(settings.store.threads)
    try:
        yield Runtime(clock=MachineClock(), random=SystemRandom(), workers=workers)
    finally:
        await asyncio.to_thread(workers.close)


def _parts(store: ObjectStore, settings: CompactSettings, runtime: Runtime) -> PartRunner:
    """Where parts of merges run: what is in the memory of this process, no other can open."""
    cas = CasStore(store, runtime, settings.store)
    if isinstance(parse_url(settings.database.url), MemoryUrl):
        return OwnProcessParts(cas)
    return ProcessParts(cas, settings)


def _holder() -> str:
    return f"compactor {os.getpid()} on {socket.gethostname()}"
