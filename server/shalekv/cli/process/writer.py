"""The process of `shalekv serve`: a writer, with its compactor and collector as child processes.

Without an elector the writer opens the database at once. With `--elect` the process waits for a
lease first:

    STANDBY ---- elected ----> OPENING ----> SERVING ---- the term ends ----> STANDBY, or the end
      NOT_SERVING; calls fail
      with the elected address

A term ends for one of these reasons:

    stop requested      drain, release the lease; the process ends
    lease lost          drain, or give up the opening; campaign again at once
    fenced              campaign again after 1 to 2 TTLs; the lease expires by itself
    temporary failure   release the lease; campaign again after 1 to 2 TTLs (`_ENDS_A_TERM`)
    other failure       release the lease; the process ends with the error

The lease only decides who tries to open the database. Opening claims an epoch and fences the older
writer, as without a lease, and that alone keeps the history consistent: if two processes believe
that they are elected, one of them is fenced.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import structlog

from shalekv.cli.process.access import ProcessAccess, open_access, running_beside
from shalekv.cli.process.endpoint import bound, sources_of
from shalekv.cli.process.gc_tuning import freeze_on_standby
from shalekv.cli.process.lifecycle import (
    bind,
    open_audit_log,
    open_behind,
    open_database,
    open_runtime,
    run_role,
    serve_until_end,
    shutting_down,
    start_serving,
)
from shalekv.cli.process.peers import open_links, peer_contexts
from shalekv.cli.process.process_reports import ChildReports
from shalekv.cli.process.shutdown import Shutdown, StopRequest
from shalekv.cli.process.supervisor import ChildSupervisor, child_commands
from shalekv.cli.process.traces import open_tracer
from shalekv.errors import (
    DatabaseExists,
    Fenced,
    ManifestConflict,
    QuorumUnavailable,
    StandingBy,
    Stopping,
    StoreUnavailable,
)
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime
from shalekv.server.access.audit import AuditLog
from shalekv.server.database import (
    Quorum,
    check_wal_mode,
    complete_creation,
    create_database,
    writer_epoch,
)
from shalekv.server.election.elector import Elector, Term
from shalekv.server.election.opening import open_elector
from shalekv.server.status import costs_of
from shalekv.server.writer import Writer
from shalekv.settings import WalChoice, WriterConfig
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.retry import RefusalPolicy
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.sources import MetricSources
from shalekv.telemetry.tracing import Tracer
from shalekv.write.quorum.links import Links

# Errors that end a term but not the process: another writer, or a failure that may pass.
_ENDS_A_TERM = (
    Stopping,
    ManifestConflict,
    QuorumUnavailable,
    StoreUnavailable,
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WriterContext:
    """The parts of a process that outlive a writer: one process may open several in turn."""

    settings: WriterConfig
    runtime: Runtime
    store: ObjectStore
    links: Links  # to the safekeepers, if the database has any
    server: Server
    announce: Callable[[str], None]  # called with HOST:PORT when it serves
    access: ProcessAccess
    audit: AuditLog | None
    tracer: Tracer | None
    children: ChildReports
    done: Metrics  # elections and fences, since the process began
    sources: MetricSources
    costs: Costs

    @property
    def address(self) -> str:
        """HOST:PORT at which clients reach this process."""
        return self.settings.server.advertise or self.server.listen


async def open_writer(context: WriterContext) -> Writer:
    """Open the database as its writer, after creating it if the settings say so.

    Raises ShaleError when it cannot be opened.
    """
    refusals = RefusalPolicy(context.store.sent, context.runtime)
    _log.info("opening", url=context.store.url)
    with refusals.opening(context.settings.writer.open_timeout_ms):
        return await _open(context)


async def _open(context: WriterContext) -> Writer:
    settings, runtime, store = context.settings, context.runtime, context.store
    since_epoch = None
    if settings.writer.open_once:  # read before others may create and open the database
        since_epoch = await writer_epoch(store, runtime, settings.store)
    if settings.database.create:
        await _create(context)
    await check_wal_mode(store, runtime, settings.store, settings.database)
    await context.access.load()
    return await Writer.open(
        store,
        settings=settings,
        runtime=runtime,
        advertise=context.address,
        since_epoch=since_epoch,
        links=context.links,
        policies=context.access.policies,
        tracer=context.tracer,
        costs=context.costs,
    )


async def _create(context: WriterContext) -> None:
    settings, store = context.settings, context.store
    quorum = None
    if settings.database.wal is WalChoice.QUORUM:
        quorum = Quorum(context.links, settings.database.safekeeper_addresses)
    try:
        await create_database(
            store,
            context.runtime,
            settings.store,
            quorum,
            clock_jump_max_s=settings.writer.clock_jump_max_s,
        )
        _log.info("database created", url=store.url)
    except DatabaseExists:
        _log.debug("database exists", url=store.url)
        if quorum is not None:
            cas = CasStore(store, context.runtime, settings.store)
            await complete_creation(cas, context.links)


def child_supervisor(context: WriterContext, writer: Writer) -> ChildSupervisor:
    """The supervisor of the child processes of `writer`; it has not started any."""
    children = ChildSupervisor(
        child_commands(context.settings),
        context.runtime,
        reports=context.children,
        is_pressed=lambda: writer.engine.is_pressed,
    )
    writer.admin.store_use.measure(context.children.processes)
    return children


async def serve_database(settings: WriterConfig, announce: Callable[[str], None]) -> None:
    """Serve until a signal requests a stop; `announce` is called with HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be opened, or the writer has failed.
    """
    sources = sources_of("writer")
    with StopRequest() as stop, open_audit_log(settings.access, "writer") as audit:
        async with (
            open_runtime(settings) as runtime,
            open_database(settings, runtime) as store,
            open_links(settings.tls, settings.server.wire) as links,
            open_access(settings, store, runtime, audit) as access,
            open_tracer(settings.telemetry, "writer", store.url) as tracer,
            nullcontext(costs_of(store, settings, runtime.clock)) as costs,
            bound(
                settings,
                sources,
                lambda: bind(settings, runtime, access.guard, tracer=tracer, costs=costs),
                access,
            ) as server,
        ):
            children, done = ChildReports(runtime.clock), _events_of(settings)
            sources.add(children.fill)
            sources.add(lambda metrics: metrics.merge(done))
            context = WriterContext(
                settings,
                runtime,
                store,
                links,
                server,
                announce,
                access,
                audit,
                tracer,
                children,
                done,
                sources,
                costs,
            )
            if settings.election.elect:
                await serve_when_elected(context, stop)
            else:
                await _serve_at_once(context, stop)
    _log.info("stopped")


def _events_of(settings: WriterConfig) -> Metrics:
    """Return the events that a process may count, none of which has happened."""
    done = Metrics()
    done.add("fenced", 0)
    if settings.election.elect:
        for event in ("started", "lost", "fenced", "failed"):
            done.add("elections", 0, event)
    return done


@contextmanager
def _noting_fence(done: Metrics) -> Iterator[None]:
    """Count in `done` if what runs while entered ends because another writer has taken over."""
    try:
        yield
    except Fenced:
        done.add("fenced", 1)
        raise


async def _serve_at_once(context: WriterContext, stop: StopRequest) -> None:
    writer = await open_behind(context.server, stop, open_writer(context))
    if writer is None:
        return
    grace_ms = context.settings.server.shutdown_grace_ms
    await start_serving(writer, context.server, context.announce, context.audit)
    children = child_supervisor(context, writer)
    with _noting_fence(context.done), context.sources.including(writer.admin.collect):
        await children.run_beside(run_role(writer, context.server, stop, grace_ms))


async def serve_when_elected(context: WriterContext, stop: StopRequest) -> None:
    """Alternate between standby and serving until a signal requests a stop.

    Raises the errors that another term cannot fix (not in `_ENDS_A_TERM`); the lease is then
    released.
    """
    settings = context.settings
    standby = _Standby(context)
    store = CasStore(context.store, context.runtime, settings.store)
    async with open_elector(
        settings.election,
        store,
        context.runtime,
        open_tls=lambda: peer_contexts(settings.tls).current,
        holder=context.address,
        on_holder_change=standby.on_elected,
        environment=os.environ,
    ) as elector:
        await standby.begin()
        _log.info("standing by", listen=context.server.listen, elect=settings.election.elect)
        try:
            async with _known_to_scrapes(context):
                await _serve_in_terms(context, elector, standby, stop)
        finally:
            context.server.refuse(shutting_down())
            await context.server.stop()


def _known_to_scrapes(context: WriterContext) -> AbstractAsyncContextManager[None]:
    """Read the access policy on standby, where scrapes alone ask for it."""
    if not context.settings.telemetry.metrics:
        return nullcontext()
    return running_beside(context.access.load_early())


async def _serve_in_terms(
    context: WriterContext, elector: Elector, standby: _Standby, stop: StopRequest
) -> None:
    while not stop.requested.is_set():
        freeze_on_standby()
        term = None
        with stop.interruptible():
            term = await elector.campaign()
        if term is None:
            return
        context.done.add("elections", 1, "started")
        try:
            with _noting_fence(context.done):
                await _Term(context, term, standby, stop).run()
        except _ENDS_A_TERM as error:
            event = "fenced" if isinstance(error, Fenced) else "failed"
            context.done.add("elections", 1, event)
            _log.warning("standing by again", reason=error.reason, problem=str(error))
            ttl_ms = context.settings.election.lease_ttl_ms
            with stop.interruptible():  # do not fence a writer that took over by force at once
                await context.runtime.clock.sleep_ms(ttl_ms * context.runtime.random.uniform(1, 2))


class _Standby:
    """The server while it is not the writer: it refuses calls, and names the elected process."""

    def __init__(self, context: WriterContext) -> None:
        self._server = context.server
        self._own_address = context.address
        self._holder = ""
        self._is_standby = False

    def on_elected(self, holder: str) -> None:
        """Record a new holder of the lease; empty: there is none. Update the refusal of calls."""
        if holder != self._holder:
            _log.info(
                "another holder is elected" if holder else "no process is elected", holder=holder
            )
        self._holder = holder
        if self._is_standby:
            self._server.set_refusal(self.refusal())

    def refusal(self) -> StandingBy:
        """The error for calls on standby, with the address of the elected process if known."""
        holder = "" if self._holder == self._own_address else self._holder
        known = f"{holder} is elected" if holder else "no other server is known to be elected"
        message = f"this server is on standby, and {known}: nothing was applied"
        return StandingBy(message, writer_address=holder)

    async def begin(self) -> None:
        """Refuse calls from now on, and cancel those in progress."""
        self._is_standby = True
        await self._server.stand_by(self.refusal())

    def end(self) -> None:
        """Stop refusing calls. REQUIRES: the caller starts the server next."""
        self._is_standby = False


class _Term:
    """One term of this process as the holder of the lease, in which it may be the writer."""

    def __init__(
        self, context: WriterContext, term: Term, standby: _Standby, stop: StopRequest
    ) -> None:
        self._context = context
        self._term = term
        self._standby = standby
        self._stop = stop
        self._shutdown = Shutdown()
        self._renewal: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until a stop is requested or the lease is lost. Raises any other reason to end."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._end_when_stopped())
            self._renewal = tasks.create_task(self._end_when_lost())
            try:
                await self._open_and_serve()
            except Exception as error:  # noqa: BLE001 - raised below, when the lease has ended
                failure = error
            finally:
                asking.cancel()
                # After a fence the lease expires by itself, to give the new writer some time.
                await self._end_lease(is_released=not isinstance(failure, Stopping))
        if failure is not None:
            raise failure

    async def _end_lease(self, *, is_released: bool) -> None:
        """Stop renewing the lease, and release it for others at once if `is_released`."""
        renewal, self._renewal = self._renewal, None
        if renewal is None:
            return
        renewal.cancel()
        await asyncio.wait([renewal])
        if is_released:
            await self._term.resign()

    async def _open_and_serve(self) -> None:
        writer = None
        with self._shutdown.interruptible():
            writer = await open_writer(self._context)
        if writer is None:
            return
        self._standby.end()
        context = self._context
        await start_serving(writer, context.server, context.announce, context.audit)
        children = child_supervisor(context, writer)
        with context.sources.including(writer.admin.collect):
            await children.run_beside(self._serve(writer))

    async def _serve(self, writer: Writer) -> None:
        grace_ms = self._context.settings.server.shutdown_grace_ms
        failure = await serve_until_end(
            writer, self._context.server, self._shutdown, grace_ms, self._refusal
        )
        if not self._stop.requested.is_set():
            await self._standby.begin()
        if failure is not None:
            raise failure
        await self._end_lease(is_released=True)  # before the children end, which may take a while
        await writer.release(self._shutdown.remaining_ms(grace_ms))

    def _refusal(self) -> Stopping:
        return shutting_down() if self._stop.requested.is_set() else self._standby.refusal()

    async def _end_when_stopped(self) -> None:
        await self._stop.requested.wait()
        self._shutdown.request()

    async def _end_when_lost(self) -> None:
        why = await self._term.keep()
        _log.warning("lease lost", problem=why)
        self._context.done.add("elections", 1, "lost")
        self._shutdown.request()
