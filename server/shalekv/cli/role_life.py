"""The life of a process that serves gRPC: bind, open, serve, and end in the right order.

    OPENING ---> SERVING --- asked to stop ---> DRAINING --- all answered, or grace over ---> end
                    |                              NOT_SERVING; new calls are turned away,
                    |                              what was accepted is brought to its end
                    +------- the role failed ----> the same for a moment, then the error

Nothing here starts a role again: a process that failed ends, and whoever started it decides.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import SystemRandom
from typing import Protocol

import structlog

from shalekv.cli.garbage import tame_garbage_collector
from shalekv.cli.stopping import StopRequest
from shalekv.clock import LoopClock
from shalekv.errors import InvalidSetting, ShaleError, Stopping
from shalekv.roles.memory_use import MemoryUse
from shalekv.roles.service import AdminService, KvService, WatchService
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import ReadSettings, ServeSettings
from shalekv.store.api import ObjectStore
from shalekv.store.opening import open_store

# Whatever is asked of a role that failed fails at once: the answers have to get out, no more.
FAILED_GRACE_MS = 1_000

_log = structlog.get_logger(__name__)


class MeasuredAdmin(AdminService, Protocol):
    """An operator's API that tells how memory is used."""

    @property
    def memory(self) -> MemoryUse:
        """The budget, and what measures its parts."""
        ...


class Role(Protocol):
    """What is served: a writer, or a reader."""

    @property
    def kv(self) -> KvService:
        """What answers the data API."""
        ...

    @property
    def admin(self) -> MeasuredAdmin:
        """What answers the operator's API."""
        ...

    @property
    def watches(self) -> WatchService:
        """What answers watches."""
        ...

    async def run(self) -> None:
        """Go on until `close`, or raise what ended it."""
        ...

    async def ended(self) -> ShaleError | None:
        """Wait until nothing more is accepted: what ended it, None after `close`."""
        ...

    def close(self) -> None:
        """Accept nothing more; `run` returns when what was accepted has come to its end."""
        ...

    async def leave(self) -> None:
        """Let go of what protects reads. REQUIRES: `run` has returned, and nobody reads."""
        ...


@asynccontextmanager
async def open_runtime(settings: ServeSettings | ReadSettings) -> AsyncIterator[Runtime]:
    """The runtime of a process."""
    workers = ThreadWorkers(settings.store.threads)
    try:
        yield Runtime(clock=LoopClock(), random=SystemRandom(), workers=workers)
    finally:
        # Not here: a thread that hangs in a system call must not keep a second signal from us.
        await asyncio.to_thread(workers.close)


@asynccontextmanager
async def open_database(
    settings: ServeSettings | ReadSettings, runtime: Runtime
) -> AsyncIterator[ObjectStore]:
    """The store of the database."""
    store = open_store(settings.database.url, runtime, settings.store)
    try:
        yield store
    finally:
        await store.close()


def bind(settings: ServeSettings | ReadSettings, runtime: Runtime) -> Server:
    """A server that has its port. Raises `InvalidSetting`, and `OSError` when it is taken."""
    try:
        return Server(settings.server, runtime, limits=settings.limits)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise InvalidSetting(f"--listen {error.strerror}") from error


async def start_serving(role: Role, server: Server, announce: Callable[[str], None]) -> None:
    """Answer calls from now on; `announce` is told the HOST:PORT."""
    memory = role.admin.memory
    memory.measure("sessions_bytes_max", lambda: server.session_room.used_bytes)
    _log.info("memory budget", sum_bytes=memory.budget.sum_bytes, **memory.budget.parts)
    tame_garbage_collector()
    await server.start(role.kv, role.admin, role.watches)
    announce(server.listen)


async def run_role(role: Role, server: Server, stop: StopRequest, grace_ms: int) -> None:
    """Serve until the end, whichever it is; raises what has ended the role."""
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        watching = (
            tasks.create_task(_end_when_asked(role, server, stop, grace_ms)),
            tasks.create_task(_refuse_when_stopped(role, server)),
        )
        try:
            await role.run()
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
    await role.leave()


async def _end_when_asked(role: Role, server: Server, stop: StopRequest, grace_ms: int) -> None:
    await stop.asked.wait()
    await server.refuse(Stopping("this server is shutting down: nothing was applied"))
    role.close()  # a writer uploads at once what is queued, which answers the calls that wait
    if not await server.drain(grace_ms):
        _log.warning("calls are cut off", shutdown_grace_ms=grace_ms)


async def _refuse_when_stopped(role: Role, server: Server) -> None:
    """Whoever watches the health hears at once; uploads in flight may take a while to end."""
    failure = await role.ended()
    if failure is not None:
        await server.refuse(_refusal(failure))


def _refusal(failure: Exception) -> Stopping:
    """What calls are told that come after the end: in any case nothing was applied."""
    if isinstance(failure, Stopping):
        return failure
    return Stopping("this server has failed: nothing was applied")
