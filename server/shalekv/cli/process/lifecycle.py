"""The life of a process that serves gRPC: bind, open, serve, and end in the right order.

    OPENING ---> SERVING --- asked to stop ---> DRAINING --- all answered, or grace over ---> end
                    |                              NOT_SERVING; new calls are turned away,
                    |                              what was accepted is brought to its end
                    +------- the role failed ----> the same for a moment, then the error

Nothing here starts a role again: a process that failed ends, and whoever started it decides. See
`cli.process.writer` for those that an elector decides about.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any, Protocol, TypeVar

import structlog
import uvloop

from shalekv.cli.console.configuration import load_settings
from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.process.gc_tuning import collect_when_grown, tame_garbage_collector
from shalekv.cli.process.logs import configure_logs
from shalekv.cli.process.shutdown import Ending, StopRequest
from shalekv.clock import MachineClock
from shalekv.errors import InvalidSetting, ShaleError, Stopping
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.rpc.server import READY, Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.readiness import Readiness
from shalekv.server.service import AdminService, KvService, WatchService
from shalekv.server.status import MemoryUse
from shalekv.settings import (
    EndpointSettings,
    LogFormat,
    QuorumSettings,
    ReadSettings,
    SafekeepSettings,
    ServeSettings,
)
from shalekv.settings.budget import with_memory_shares
from shalekv.store.api import ObjectStore
from shalekv.store.opening import open_store
from shalekv.wording import Trouble

# Whatever is asked of a role that failed fails at once: the answers have to get out, no more.
FAILED_GRACE_MS = 1_000
READINESS_POLL_MS = 500

_log = structlog.get_logger(__name__)


class MeasuredAdmin(AdminService, Protocol):
    """An operator's API that tells how memory is used."""

    @property
    def memory(self) -> MemoryUse:
        """The budget, and what measures its parts."""
        ...


class Life(Protocol):
    """What goes on behind a server, whatever it answers."""

    async def run(self) -> None:
        """Go on until `close`, or raise what ended it."""
        ...

    async def ended(self) -> ShaleError | None:
        """Wait until nothing more is accepted: what ended it, None after `close`."""
        ...

    def close(self) -> None:
        """Accept nothing more; `run` returns when what was accepted has come to its end."""
        ...

    def readiness(self) -> Readiness | None:
        """State of reads and writes; None for a role that answers neither."""
        ...

    async def leave(self, timeout_ms: float) -> None:
        """Let go of what protects reads. REQUIRES: `run` has returned, and nobody reads."""
        ...


class Role(Life, Protocol):
    """What is served of a database: a writer, or a reader."""

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


@asynccontextmanager
async def open_runtime(
    settings: ServeSettings | ReadSettings | SafekeepSettings,
) -> AsyncIterator[Runtime]:
    """The runtime of a process that serves; garbage is collected meanwhile when it has grown."""
    clock, workers = MachineClock(), ThreadWorkers(settings.store.threads)
    collecting = asyncio.create_task(collect_when_grown(clock), name="collect garbage")
    try:
        yield Runtime(clock=clock, random=SystemRandom(), workers=workers)
    finally:
        collecting.cancel()
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


@asynccontextmanager
async def open_links(settings: QuorumSettings | None = None) -> AsyncIterator[GrpcLinks]:
    """The way to safekeepers; none is asked for anything yet."""
    timeout_ms = (settings or QuorumSettings()).safekeeper_connect_timeout_ms
    links = GrpcLinks(connect_timeout_ms=timeout_ms)
    try:
        yield links
    finally:
        await links.close()


def bind(settings: ServeSettings | ReadSettings, runtime: Runtime) -> Server:
    """A server that has its port. Raises `InvalidSetting`, and `OSError` when it is taken."""
    return bind_port(lambda: Server(settings.server, runtime, limits=settings.limits))


def bind_port(make: Callable[[], Server]) -> Server:
    """The server that `make` makes; raises as `bind`."""
    try:
        return make()
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
    await server.start(role.kv, role.admin, role.watches, role.readiness() or READY)
    announce(server.listen)


async def run_role(role: Life, server: Server, stop: StopRequest, grace_ms: int) -> None:
    """Serve until the end, whichever it is; raises what has ended the role."""
    failure = await role_to_its_end(role, server, stop, grace_ms, asked_to_stop)
    await server.stop()
    if failure is not None:
        raise failure
    await role.leave(stop.left_ms(grace_ms))


def asked_to_stop() -> Stopping:
    """What calls are told that come after a request to stop."""
    return Stopping("this server is shutting down: nothing was applied")


async def role_to_its_end(
    role: Life, server: Server, ending: Ending, grace_ms: int, refusal: Callable[[], Stopping]
) -> Exception | None:
    """Serve until nothing is accepted any more, and all is answered that was; what has failed.

    Calls that come after `ending` was asked for are told the `refusal`. The server still listens.
    """
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        watching = (
            tasks.create_task(_end_when_asked(role, server, ending, grace_ms, refusal)),
            tasks.create_task(_refuse_when_stopped(role, server)),
        )
        reporting = tasks.create_task(_report_readiness(role, server))
        try:
            await role.run()
        except Exception as error:  # noqa: BLE001 - returned, when the calls have been answered
            failure = error
            for task in watching:
                task.cancel()
        finally:
            reporting.cancel()
    if failure is not None:
        await server.refuse(_refusal(failure))
        await server.drain(FAILED_GRACE_MS)
    return failure


async def _end_when_asked(
    role: Life, server: Server, ending: Ending, grace_ms: int, refusal: Callable[[], Stopping]
) -> None:
    await ending.asked.wait()
    await server.refuse(refusal())
    role.close()  # a writer uploads at once what is queued, which answers the calls that wait
    if not await server.drain(grace_ms):
        _log.warning("calls are cut off", shutdown_grace_ms=grace_ms)


async def _report_readiness(role: Life, server: Server) -> None:
    """Tell health checks, and in the log, when reads or writes begin to fail and succeed again."""
    clock, failing = MachineClock(), dict[str, Trouble]()
    while (readiness := role.readiness()) is not None:
        await server.report(readiness)
        for calls, trouble in (("reads", readiness.reads), ("writes", readiness.writes)):
            if trouble is not None and calls not in failing:
                problem = trouble.text(clock.monotonic_ms())
                _log.error("not ready", calls=calls, problem=problem)
                failing[calls] = trouble
            elif trouble is None and failing.pop(calls, None) is not None:
                _log.info("ready again", calls=calls)
        await clock.sleep_ms(READINESS_POLL_MS)


async def _refuse_when_stopped(role: Life, server: Server) -> None:
    """Whoever watches the health hears at once; uploads in flight may take a while to end."""
    failure = await role.ended()
    if failure is not None:
        await server.refuse(_refusal(failure))


def _refusal(failure: Exception) -> Stopping:
    """What calls are told that come after the end: in any case nothing was applied."""
    if isinstance(failure, Stopping):
        return failure
    return Stopping("this server has failed: nothing was applied")


# --- server_command
# What the commands have in common that serve gRPC: their settings, and how their process ends.


ServingT = TypeVar("ServingT", ServeSettings, ReadSettings)
ListeningT = TypeVar("ListeningT", ServeSettings, ReadSettings, SafekeepSettings)
Serve = Callable[[ListeningT, Callable[[str], None]], Coroutine[Any, Any, None]]


def serving_settings(flags: dict[str, Any], config: Path | None, model: type[ServingT]) -> ServingT:
    """The settings of a server, its memory divided. Raises `InvalidSetting`."""
    settings = load_settings(flags, config, model)
    try:
        settings = with_memory_shares(settings)
    except ValueError as error:
        message = f"--{error}".replace("memory_bytes", "memory-bytes", 1)
        raise InvalidSetting(message) from None
    refuse_exposure(settings.server)
    return settings


def run_server(
    settings: ListeningT, serve: Serve[ListeningT], greet: Callable[[str], None]
) -> ExitCode:
    """Run `serve` to its end, however it ends; `greet` is told the HOST:PORT on a terminal."""
    configure_logs(settings.server.log_format, settings.server.log_level)
    log = structlog.get_logger(__name__)

    def announce(listen: str) -> None:
        log.info("serving", listen=listen, url=settings.database.url)
        if settings.server.log_format is LogFormat.CONSOLE:
            greet(listen)

    try:
        uvloop.run(serve(settings, announce))
    except Exception as error:  # noqa: BLE001 - logged, in the format that was asked for
        code = exit_code_of(error)
        ended = log.bind(exit_code=code.value)
        if isinstance(error, ShaleError):
            # It says all there is to know: a traceback would only hide it.
            ended.error("ended by an error", reason=error.reason, problem=str(error))
        elif code is ExitCode.ADDRESS_IN_USE and isinstance(error, OSError):
            problem = f"{error.strerror}: stop what listens there, or give another --listen"
            ended.error("ended by an error", reason=code.name, problem=problem)
        else:
            ended.exception("ended by an unexpected error")
        return code
    return ExitCode.OK


def refuse_exposure(settings: EndpointSettings) -> None:
    """Raise `InvalidSetting` when the network could reach the port and nobody has allowed it."""
    host = settings.listen.rpartition(":")[0].strip("[]")
    if settings.insecure or _is_loopback(host):
        return
    raise InvalidSetting(
        f"--listen {settings.listen} is open to the network, and connections are neither "
        "encrypted nor authenticated: whoever reaches the port can read and change everything. "
        "Listen on 127.0.0.1 and let something that does TLS stand in front, or accept this with "
        "--insecure."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: nobody knows what it will resolve to
        return False
