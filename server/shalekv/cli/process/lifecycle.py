"""Lifecycle of a process that serves gRPC: settings, bind, open, serve, drain, and exit code.

    OPENING ---> SERVING --- stop requested --> DRAINING --- all answered, or grace over ---> end
                    |                              NOT_SERVING; new calls are refused,
                    |                              accepted ones are completed
                    +------- the role failed ---> FAILED --- FAILED_GRACE_MS at most --> error
                                                   NOT_SERVING; calls fail

While it serves, `_report_readiness` passes the readiness of the role to the health checks of
`rpc.server`. `run_server` converts the error that ends the process to its exit code.

Nothing here restarts a role: a failed process ends, and its supervisor decides. See
`cli.process.writer` for writers that are started by an election.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, Protocol, TypeVar

import click
import structlog
import uvloop

from shalekv.cli.console.configuration import load_settings
from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.process.endpoint import refuse_exposed_metrics
from shalekv.cli.process.gc_tuning import collect_when_grown, tune_garbage_collector
from shalekv.cli.process.logs import configure_logs, report_end
from shalekv.cli.process.shutdown import Shutdown, StopRequest, on_hangup
from shalekv.clock import MachineClock
from shalekv.errors import InvalidSetting, ShaleError, Stopping
from shalekv.rpc.call_telemetry import Recorders
from shalekv.rpc.native_server import Door
from shalekv.rpc.server import READY, Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.access.audit import AuditLog
from shalekv.server.access.audit_file import AuditFile
from shalekv.server.access.guard import Guard
from shalekv.server.readiness import Readiness
from shalekv.server.service import AdminService, KvService, WatchService
from shalekv.server.status import ProcessReport
from shalekv.settings import (
    UNIX,
    AccessSettings,
    EndpointSettings,
    LogFormat,
    ReaderConfig,
    SafekeeperConfig,
    Wire,
    WriterConfig,
)
from shalekv.settings.budget import with_memory_shares
from shalekv.store.api import ObjectStore
from shalekv.store.opening import open_store
from shalekv.store.url import is_loopback
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.telemetry.tracing import Tracer
from shalekv.wording import Trouble

# Calls to a failed role fail at once: this is only for their replies to be sent.
FAILED_GRACE_MS = 1_000
READINESS_POLL_MS = 500
FILES_WANTED = 65_536  # open at once: connections, and files of a store on a disk
_EVERY_HOST = ("0.0.0.0", "[::]")  # noqa: S104 - looked for, not bound
# A worker that computes leaves the interpreter to the event loop after this time; the default is
# ten times as long, and the loop waits for it each time that it has slept.
SWITCH_S = 0.000_5

BoundT = TypeVar("BoundT")
RoleT = TypeVar("RoleT")
ServingT = TypeVar("ServingT", WriterConfig, ReaderConfig)
ListeningT = TypeVar("ListeningT", WriterConfig, ReaderConfig, SafekeeperConfig)
Serve = Callable[[ListeningT, Callable[[str], None]], Coroutine[Any, Any, None]]

_log = structlog.get_logger(__name__)


class MeasuredAdmin(AdminService, Protocol):
    """The admin API of a role that reports its use of memory."""

    @property
    def report(self) -> ProcessReport:
        """The part of a status that describes this process."""
        ...


class ServerRole(Protocol):
    """The part of a process behind its gRPC server: a writer, a reader, or a safekeeper."""

    async def run(self) -> None:
        """Run until `close`. Raises the error that ended it before."""
        ...

    async def ended(self) -> ShaleError | None:
        """Wait until no more calls are accepted. Returns the failure, or None after `close`."""
        ...

    def close(self) -> None:
        """Accept no more calls; `run` returns when the accepted ones are complete."""
        ...

    def readiness(self) -> Readiness | None:
        """State of reads and writes; None for a role that serves neither."""
        ...

    async def release(self, timeout_ms: float) -> None:
        """Delete the snapshots that protect reads, and close files.

        REQUIRES: `run` has returned, and no read is running.
        """
        ...


class DatabaseRole(ServerRole, Protocol):
    """A role that serves a database: a writer, or a reader."""

    @property
    def kv(self) -> KvService:
        """The data API."""
        ...

    @property
    def admin(self) -> MeasuredAdmin:
        """The admin API."""
        ...

    @property
    def watches(self) -> WatchService:
        """The watch API."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of the writer, or that of the last writer that a reader knows."""
        ...


@asynccontextmanager
async def open_runtime(
    settings: WriterConfig | ReaderConfig | SafekeeperConfig,
) -> AsyncIterator[Runtime]:
    """The runtime of a serving process; collects garbage when memory has grown, until closed."""
    sys.setswitchinterval(SWITCH_S)
    clock, workers = MachineClock(), ThreadWorkers(settings.store.threads)
    collecting = asyncio.create_task(collect_when_grown(clock), name="collect garbage")
    try:
        yield Runtime(clock=clock, random=SystemRandom(), workers=workers)
    finally:
        collecting.cancel()
        # In a thread: a worker that hangs in a system call must not block the loop, which has to
        # handle a second signal.
        await asyncio.to_thread(workers.close)


@contextmanager
def open_audit_log(settings: AccessSettings, role: str) -> Iterator[AuditLog | None]:
    """Open the audit log of a process, if it has one; SIGHUP opens it again. Closed at the end.

    Raises `InvalidSetting` if it cannot be opened.
    """
    if not settings.audit_log:
        yield None
        return
    clock = MachineClock()
    file = AuditFile(settings.audit_log, clock)
    with (
        closing(file),
        on_hangup(file.reopen),
        closing(AuditLog(settings, file, clock, role)) as log,
    ):
        yield log


@asynccontextmanager
async def open_database(
    settings: WriterConfig | ReaderConfig, runtime: Runtime
) -> AsyncIterator[ObjectStore]:
    """Open the store of the database, and close it at the end."""
    store = open_store(settings.database.url, runtime, settings.store)
    try:
        yield store
    finally:
        await store.close()


def bind(
    settings: WriterConfig | ReaderConfig,
    runtime: Runtime,
    guard: Guard,
    door: Door | None = None,
    tracer: Tracer | None = None,
    costs: Costs | None = None,
    process: int = 0,
) -> Server:
    """Create a server bound to its port, or one that takes its connections from `door`.

    `tracer` records calls; None: nobody does. `costs` are charged with the requests of calls.
    `process` is the number of this one, of several that share the port.

    Raises `InvalidSetting`, and `OSError` if the port is in use.
    """
    make = partial(Server, settings.server, runtime, limits=settings.limits, tls=settings.tls)
    is_open = settings.access.open_services
    recorders = Recorders(
        SlowCalls(settings.telemetry.slow_ms, runtime.clock, process), tracer, costs
    )
    return bind_port(
        lambda: make(door=door, guard=guard, open_services=is_open, recorders=recorders)
    )


def bind_port(make: Callable[[], BoundT]) -> BoundT:
    """Bind a port by `make`. Raises as `bind`."""
    try:
        return make()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise InvalidSetting(f"--listen {error.strerror}") from error


async def open_behind(
    server: Server, shutdown: Shutdown, opening: Awaitable[RoleT]
) -> RoleT | None:
    """Open the role of a server, which gives up its port when that fails.

    Returns None when a shutdown was requested meanwhile.
    """
    role = None
    try:
        with shutdown.interruptible():
            role = await opening
    finally:
        if role is None:
            await server.stop()
    return role


async def start_serving(
    role: DatabaseRole,
    server: Server,
    announce: Callable[[str], None],
    audit: AuditLog | None = None,
) -> None:
    """Serve calls from now on; `announce` is called with HOST:PORT."""
    if audit is not None:
        audit.enter_term(lambda: role.epoch)
    memory = role.admin.report.memory
    memory.measure("sessions_bytes_max", lambda: server.session_budget.used_bytes)
    _log.info("memory budget", sum_bytes=memory.budget.sum_bytes, **memory.budget.parts)
    tune_garbage_collector(memory)
    await server.start(role.kv, role.admin, role.watches, role.readiness() or READY)
    announce(server.listen)


async def run_role(role: ServerRole, server: Server, stop: StopRequest, grace_ms: int) -> None:
    """Serve until a stop is requested, and shut down. Raises the error that ended the role."""
    failure = await serve_until_end(role, server, stop, grace_ms, shutting_down)
    await server.stop()
    if failure is not None:
        raise failure
    await role.release(stop.remaining_ms(grace_ms))


def shutting_down() -> Stopping:
    """The error for calls that arrive after a stop was requested."""
    return Stopping("this server is shutting down: nothing was applied")


async def serve_until_end(
    role: ServerRole,
    server: Server,
    shutdown: Shutdown,
    grace_ms: int,
    refusal: Callable[[], Stopping],
) -> Exception | None:
    """Serve until no calls are accepted any more, and the accepted ones are answered.

    Returns the failure of the role, or None. Calls after a request of `shutdown` fail with
    `refusal`. The server still listens afterwards.
    """
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        watching = (
            tasks.create_task(_end_when_requested(role, server, shutdown, grace_ms, refusal)),
            tasks.create_task(_refuse_when_stopped(role, server)),
        )
        reporting = tasks.create_task(_report_readiness(role, server))
        try:
            await role.run()
        except Exception as error:  # noqa: BLE001 - returned after the calls have been answered
            failure = error
            for task in watching:
                task.cancel()
        finally:
            reporting.cancel()
    if failure is not None:
        server.refuse(_refusal(failure))
        await server.drain(FAILED_GRACE_MS)
    return failure


async def _end_when_requested(
    role: ServerRole,
    server: Server,
    shutdown: Shutdown,
    grace_ms: int,
    refusal: Callable[[], Stopping],
) -> None:
    await shutdown.requested.wait()
    server.refuse(refusal())
    role.close()  # a writer uploads its queue at once, which answers the waiting calls
    if not await server.drain(grace_ms):
        _log.warning("calls are cut off", shutdown_grace_ms=grace_ms)


async def _report_readiness(role: ServerRole, server: Server) -> None:
    """Report to health checks and to the log when reads or writes begin to fail, and recover."""
    clock, failing = MachineClock(), dict[str, Trouble]()
    while (readiness := role.readiness()) is not None:
        server.report(readiness)
        for calls, trouble in (("reads", readiness.reads), ("writes", readiness.writes)):
            if trouble is not None and calls not in failing:
                problem = trouble.text(clock.monotonic_ms())
                _log.error("not ready", calls=calls, problem=problem)
                failing[calls] = trouble
            elif trouble is None and failing.pop(calls, None) is not None:
                _log.info("ready again", calls=calls)
        await clock.sleep_ms(READINESS_POLL_MS)


async def _refuse_when_stopped(role: ServerRole, server: Server) -> None:
    """Report a failed role to health checks at once: uploads in flight may take a while to end."""
    failure = await role.ended()
    if failure is not None:
        server.refuse(_refusal(failure))


def _refusal(failure: Exception) -> Stopping:
    """The error for calls that arrive after the role has ended: they were not applied."""
    if isinstance(failure, Stopping):
        return failure
    return Stopping("this server has failed: nothing was applied")


def serving_settings(flags: dict[str, Any], config: Path | None, model: type[ServingT]) -> ServingT:
    """Load the settings of a server, with its memory divided. Raises `InvalidSetting`."""
    settings = load_settings(flags, config, model)
    try:
        settings = with_memory_shares(settings)
    except ValueError as error:
        message = f"--{error}".replace("memory_bytes", "memory-bytes", 1)
        raise InvalidSetting(message) from None
    check_ports(settings)
    return settings


def run_server(
    settings: ListeningT,
    serve: Serve[ListeningT],
    greet: Callable[[str], None],
    *,
    process: int = 0,
) -> ExitCode:
    """Run `serve` to its end, log an error, and return the exit code.

    `greet` is called with HOST:PORT when it serves, if the log is meant for people. `process` is
    the number of this process, added to each line of the log, if it is one of several.
    """
    configure_logs(settings.server.log_format, settings.server.log_level, process=process)
    _raise_file_limit()
    log = structlog.get_logger(__name__)

    def announce(listen: str) -> None:
        wire = settings.server.wire
        tls = _tls_in_use(settings)
        log.info("serving", listen=listen, url=settings.database.url, wire=wire.value, tls=tls)
        if wire is not Wire.NATIVE:
            log.warning("calls go over the fallback", wire=wire.value, default=Wire.NATIVE.value)
        if settings.server.log_format is LogFormat.CONSOLE:
            greet(listen)
            if tls != "off":
                by_servers = isinstance(settings, SafekeeperConfig)
                authority = "--tls-server-ca" if by_servers else "--tls-ca"
                click.echo(
                    f"TLS is {tls}, so this needs {authority} FILE as well, and --tls-cert and "
                    "--tls-key where certificates of clients are asked for (grpcurl: -cacert, "
                    "-cert and -key instead of -plaintext).",
                    err=True,
                )

    try:
        uvloop.run(serve(settings, announce))
    except Exception as error:  # noqa: BLE001 - logged, in the format that was asked for
        code = exit_code_of(error)
        report_end(error, code, settings.server.log_format)
        return code
    return ExitCode.OK


def _tls_in_use(settings: WriterConfig | ReaderConfig | SafekeeperConfig) -> str:
    """Return whether connections have TLS, for people."""
    if not settings.tls.has_certificate or settings.server.listen.startswith(UNIX):
        return "off"
    return "on, clients need certificates" if settings.tls.tls_client_ca else "on"


def _raise_file_limit() -> None:
    """Let this process open more files than shells allow by default, if the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the system has another limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_ports(settings: WriterConfig | ReaderConfig | SafekeeperConfig) -> None:
    """Raise `InvalidSetting` when both ports are one, or one of them is exposed.

    Exposed is what is open to the network without TLS or `insecure`.
    """
    listen, metrics = settings.server.listen, settings.telemetry.metrics
    if _is_one_port(listen, metrics):
        raise InvalidSetting(
            f"--metrics {metrics} and --listen {listen} are one port, and each needs its own: give "
            "one of them another port"
        )
    refuse_exposed_metrics(settings.telemetry, settings.server, settings.tls)
    if settings.tls.has_certificate or not is_exposed(settings.server):
        return
    raise InvalidSetting(
        f"--listen {listen} is open to the network, and connections are neither "
        "encrypted nor authenticated: anyone who reaches the port can read and change everything. "
        "Give --tls-cert and --tls-key (`shalekv tls init` makes some for trials), or accept this "
        "with --insecure."
    )


def _is_one_port(one: str, other: str) -> bool:
    """Return whether two addresses, one of which may be empty, have a port in common."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    if one.startswith(UNIX) or not other or int(port) != int(other_port) or not int(port):
        return False
    return host == other_host or not {host, other_host}.isdisjoint(_EVERY_HOST)


def is_exposed(settings: EndpointSettings) -> bool:
    """Return whether the port is open to the network, and `insecure` does not allow that."""
    host = settings.listen.rpartition(":")[0].strip("[]")
    is_local = settings.listen.startswith(UNIX) or is_loopback(host)
    return not (is_local or settings.insecure)
