"""The life of `shalekv serve`: bind, open, serve, and end in the right order.

    OPENING ---> SERVING --- asked to stop ---> DRAINING --- all answered, or grace over ---> end
                    |                              NOT_SERVING; new calls are turned away,
                    |                              writes that were accepted are made durable
                    +------- the writer failed --> the same for a moment, then the error

Nothing here starts a writer again: a fenced process ends, and whoever started it decides.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import SystemRandom

import structlog

from shalekv.cli.children import Children, child_commands
from shalekv.cli.garbage import tame_garbage_collector
from shalekv.cli.stopping import StopRequest
from shalekv.clock import LoopClock
from shalekv.errors import DatabaseExists, InvalidSetting, Stopping
from shalekv.roles.database import create_database
from shalekv.roles.writer import Writer
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import ServeSettings
from shalekv.store.api import ObjectStore
from shalekv.store.opening import open_store

# Whatever is asked of a writer that failed fails at once: the answers have to get out, no more.
FAILED_GRACE_MS = 1_000

_log = structlog.get_logger(__name__)


async def serve_database(settings: ServeSettings, announce: Callable[[str], None]) -> None:
    """Serve until a signal asks to stop; `announce` is told the HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be opened, or the writer has failed.
    """
    with StopRequest() as stop:
        async with _runtime(settings) as runtime, _store(settings, runtime) as store:
            server = _bind(settings, runtime)
            writer = None
            with stop.interrupts():
                writer = await _open(store, settings, runtime, server.listen)
            if writer is None:
                return
            memory = writer.admin.memory
            memory.measure("sessions_bytes_max", lambda: server.session_room.used_bytes)
            _log.info("memory budget", sum_bytes=memory.budget.sum_bytes, **memory.budget.parts)
            tame_garbage_collector()
            await server.start(writer.kv, writer.admin)
            announce(server.listen)
            children = _children(settings, runtime, writer)
            writer.admin.store_use.measure(children.reports.processes)
            await children.beside(_run(writer, server, stop, settings.server.shutdown_grace_ms))
    _log.info("stopped")


@asynccontextmanager
async def _runtime(settings: ServeSettings) -> AsyncIterator[Runtime]:
    workers = ThreadWorkers(settings.store.threads)
    try:
        yield Runtime(clock=LoopClock(), random=SystemRandom(), workers=workers)
    finally:
        # Not here: a thread that hangs in a system call must not keep a second signal from us.
        await asyncio.to_thread(workers.close)


@asynccontextmanager
async def _store(settings: ServeSettings, runtime: Runtime) -> AsyncIterator[ObjectStore]:
    store = open_store(settings.database.url, runtime, settings.store)
    try:
        yield store
    finally:
        await store.close()


def _bind(settings: ServeSettings, runtime: Runtime) -> Server:
    try:
        return Server(settings.server, runtime, limits=settings.limits)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise InvalidSetting(f"--listen {error.strerror}") from error


async def _open(
    store: ObjectStore, settings: ServeSettings, runtime: Runtime, listen: str
) -> Writer:
    if settings.database.create:
        try:
            await create_database(store, runtime, settings.store)
            _log.info("database created", url=store.url)
        except DatabaseExists:
            _log.debug("database exists", url=store.url)
    advertise = settings.server.advertise or listen
    return await Writer.open(store, settings=settings, runtime=runtime, advertise=advertise)


def _children(settings: ServeSettings, runtime: Runtime, writer: Writer) -> Children:
    return Children(
        child_commands(settings),
        settings.children,
        runtime,
        is_pressed=lambda: writer.engine.is_pressed,
    )


async def _run(writer: Writer, server: Server, stop: StopRequest, grace_ms: int) -> None:
    """Serve until the end, whichever it is; raises what has ended the writer."""
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        watching = (
            tasks.create_task(_end_when_asked(writer, server, stop, grace_ms)),
            tasks.create_task(_refuse_when_stopped(writer, server)),
        )
        try:
            await writer.run()
        except Exception as error:  # noqa: BLE001 - raised below, when the calls have been answered
            failure = error
            for task in watching:
                task.cancel()
    if failure is not None:
        await server.refuse(_refusal(failure))
        await server.drain(FAILED_GRACE_MS)
    await server.stop()
    if failure is not None:
        raise failure
    await writer.leave()


async def _end_when_asked(writer: Writer, server: Server, stop: StopRequest, grace_ms: int) -> None:
    await stop.asked.wait()
    await server.refuse(Stopping("this server is shutting down: nothing was applied"))
    writer.close()  # uploads at once what is queued, which answers the calls that wait for it
    if not await server.drain(grace_ms):
        _log.warning("calls are cut off", shutdown_grace_ms=grace_ms)


async def _refuse_when_stopped(writer: Writer, server: Server) -> None:
    """Whoever watches the health hears at once; uploads in flight may take a while to end."""
    failure = await writer.ended()
    if failure is not None:
        await server.refuse(_refusal(failure))


def _refusal(failure: Exception) -> Stopping:
    """What calls are told that come after the writer's end: in any case nothing was applied."""
    if isinstance(failure, Stopping):
        return failure
    return Stopping("the writer of this server has failed: nothing was applied")
