"""What `shalekv serve` runs: a writer, and its compactor and collector as child processes.

With an elector the same goes on behind a lease: see `cli.process.writer`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shalekv.cli.process.lifecycle import (
    asked_to_stop,
    bind,
    open_database,
    open_links,
    open_runtime,
    role_to_its_end,
    run_role,
    start_serving,
)
from shalekv.cli.process.shutdown import Ending, StopRequest
from shalekv.cli.process.supervisor import Children, child_commands
from shalekv.errors import (
    DatabaseExists,
    ManifestConflict,
    QuorumUnavailable,
    StandingBy,
    Stopping,
    StoreUnavailable,
)
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime
from shalekv.server.database import (
    Quorum,
    check_wal_mode,
    complete_creation,
    create_database,
    writer_epoch,
)
from shalekv.server.election.elector import Elector, Term
from shalekv.server.election.opening import open_elector
from shalekv.server.writer import Writer
from shalekv.settings import ServeSettings, WalChoice
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.retry import RefusalPolicy
from shalekv.write.quorum.links import Links

# --- writing_ground
# What a process needs in order to be the writer, as often as it is.


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WriterContext:
    """The parts of a process that stay when a writer goes."""

    settings: ServeSettings
    runtime: Runtime
    store: ObjectStore
    links: Links  # to safekeepers, if the database has some
    server: Server
    announce: Callable[[str], None]  # told HOST:PORT when it serves

    @property
    def address(self) -> str:
        """HOST:PORT under which clients reach this process."""
        return self.settings.server.advertise or self.server.listen


async def open_writer(ground: WriterContext) -> Writer:
    """Open the database as its writer; create it first, if the settings want that."""
    refusals = RefusalPolicy(ground.store.sent, ground.runtime)
    _log.info("opening", url=ground.store.url)
    with refusals.opening(ground.settings.writer.open_timeout_ms):
        return await _open(ground)


async def _open(ground: WriterContext) -> Writer:
    settings, runtime, store = ground.settings, ground.runtime, ground.store
    since_epoch = None
    if settings.writer.open_once:  # others may create the database, and open it, before we do
        since_epoch = await writer_epoch(store, runtime, settings.store)
    if settings.database.create:
        await _create(ground)
    await check_wal_mode(store, runtime, settings.store, settings.database)
    return await Writer.open(
        store,
        settings=settings,
        runtime=runtime,
        advertise=ground.address,
        since_epoch=since_epoch,
        links=ground.links,
    )


async def _create(ground: WriterContext) -> None:
    settings, store = ground.settings, ground.store
    quorum = None
    if settings.database.wal is WalChoice.QUORUM:
        quorum = Quorum(ground.links, settings.database.safekeeper_addresses)
    try:
        await create_database(
            store,
            ground.runtime,
            settings.store,
            quorum,
            clock_jump_max_s=settings.writer.clock_jump_max_s,
        )
        _log.info("database created", url=store.url)
    except DatabaseExists:
        _log.debug("database exists", url=store.url)
        if quorum is not None:
            cas = CasStore(store, ground.runtime, settings.store)
            await complete_creation(cas, ground.links)


def children_of(ground: WriterContext, writer: Writer) -> Children:
    """The child processes beside this writer; none runs yet."""
    children = Children(
        child_commands(ground.settings),
        ground.settings.children,
        ground.runtime,
        is_pressed=lambda: writer.engine.is_pressed,
    )
    writer.admin.store_use.measure(children.reports.processes)
    return children


# --- writer


async def serve_database(settings: ServeSettings, announce: Callable[[str], None]) -> None:
    """Serve until a signal asks to stop; `announce` is told the HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be opened, or the writer has failed.
    """
    with StopRequest() as stop:
        async with (
            open_runtime(settings) as runtime,
            open_database(settings, runtime) as store,
            open_links(settings.quorum) as links,
        ):
            server = bind(settings, runtime)
            ground = WriterContext(settings, runtime, store, links, server, announce)
            if settings.election.elect:
                await serve_when_elected(ground, stop)
            else:
                await _serve_at_once(ground, stop)
    _log.info("stopped")


async def _serve_at_once(ground: WriterContext, stop: StopRequest) -> None:
    writer = None
    with stop.interrupts():
        writer = await open_writer(ground)
    if writer is None:
        return
    grace_ms = ground.settings.server.shutdown_grace_ms
    await start_serving(writer, ground.server, ground.announce)
    children = children_of(ground, writer)
    await children.beside(run_role(writer, ground.server, stop, grace_ms))


# --- standing_by
# What `shalekv serve --elect ...` runs: a server that waits for a lease, and the writer behind
# it.
#
#     STANDING BY ---- elected ----> opening ----> SERVING ---- asked to stop --> draining, release
#       NOT_SERVING; calls              |             |
#       are told who is elected         |             +-- lease lost: the same, without a release
#         ^                             |             +-- fenced: another has opened the database
#         |                             v             v
#         +------ a while later --------+-------------+
#
# The lease only decides who tries. Whoever opens the database wins an epoch and fences, as
# without a lease, and that alone keeps the history right: with two that were elected, one is
# fenced.


# What ends a term, and not the process: another writer, or trouble that may pass.
_ENDS_A_TERM = (
    Stopping,
    ManifestConflict,
    QuorumUnavailable,
    StoreUnavailable,
)


async def serve_when_elected(ground: WriterContext, stop: StopRequest) -> None:
    """Stand by, serve, and stand by again, until a signal asks to stop.

    Raises what standing by again cannot mend; the lease is then released.
    """
    settings = ground.settings
    standing = _Standing(ground)
    store = CasStore(ground.store, ground.runtime, settings.store)
    async with open_elector(
        settings.election,
        store,
        ground.runtime,
        holder=ground.address,
        told=standing.told,
        environment=os.environ,
    ) as elector:
        await standing.begin()
        _log.info("standing by", listen=ground.server.listen, elect=settings.election.elect)
        try:
            await _serve_in_terms(ground, elector, standing, stop)
        finally:
            await ground.server.refuse(asked_to_stop())
            await ground.server.stop()


async def _serve_in_terms(
    ground: WriterContext, elector: Elector, standing: _Standing, stop: StopRequest
) -> None:
    while not stop.asked.is_set():
        term = None
        with stop.interrupts():
            term = await elector.campaign()
        if term is None:
            return
        try:
            await _Term(ground, term, standing, stop).run()
        except _ENDS_A_TERM as error:
            _log.warning("stands by again", reason=error.reason, problem=str(error))
            ttl_ms = ground.settings.election.lease_ttl_ms
            with stop.interrupts():  # who took over by force shall not be fenced at once
                await ground.runtime.clock.sleep_ms(ttl_ms * ground.runtime.random.uniform(1, 2))


class _Standing:
    """The server while it is not the writer: what it tells of whoever is elected."""

    def __init__(self, ground: WriterContext) -> None:
        """Nobody is known yet."""
        self._server = ground.server
        self._own_address = ground.address
        self._holder = ""
        self._is_standing = False

    def told(self, holder: str) -> None:
        """Another one is elected."""
        if holder != self._holder:
            _log.info("somebody is elected" if holder else "nobody is elected", holder=holder)
        self._holder = holder
        if self._is_standing:
            self._server.tell(self.refusal())

    def refusal(self) -> StandingBy:
        """What calls are told now."""
        holder = "" if self._holder == self._own_address else self._holder
        known = f"{holder} is elected" if holder else "nobody else is known to be elected"
        message = f"this server stands by, and {known}: nothing was applied"
        return StandingBy(message, writer_address=holder)

    async def begin(self) -> None:
        """Turn calls away, and cut off those that go on."""
        self._is_standing = True
        await self._server.stand_by(self.refusal())

    def end(self) -> None:
        """Somebody starts the server."""
        self._is_standing = False


class _Term:
    """One term of this process as the one that tries to be the writer."""

    def __init__(
        self, ground: WriterContext, term: Term, standing: _Standing, stop: StopRequest
    ) -> None:
        """It has just been elected."""
        self._ground = ground
        self._term = term
        self._standing = standing
        self._stop = stop
        self._ending = Ending()
        self._keeping: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until we are asked to stop, or the lease is lost; raises what else has ended it."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._end_when_asked())
            self._keeping = tasks.create_task(self._end_when_lost())
            try:
                await self._be_the_writer()
            except Exception as error:  # noqa: BLE001 - raised below, when the lease is let go
                failure = error
            finally:
                asking.cancel()
                # Who has fenced this writer is to have some time: then the lease lapses by itself.
                await self._let_go(is_released=not isinstance(failure, Stopping))
        if failure is not None:
            raise failure

    async def _let_go(self, *, is_released: bool) -> None:
        """Renew the lease no more; others may have it at once, if it `is_released`."""
        keeping, self._keeping = self._keeping, None
        if keeping is None:
            return
        keeping.cancel()
        await asyncio.wait([keeping])
        if is_released:
            await self._term.resign()

    async def _be_the_writer(self) -> None:
        writer = None
        with self._ending.interrupts():
            writer = await open_writer(self._ground)
        if writer is None:
            return
        self._standing.end()
        await start_serving(writer, self._ground.server, self._ground.announce)
        children = children_of(self._ground, writer)
        await children.beside(self._serve(writer))

    async def _serve(self, writer: Writer) -> None:
        grace_ms = self._ground.settings.server.shutdown_grace_ms
        failure = await role_to_its_end(
            writer, self._ground.server, self._ending, grace_ms, self._refusal
        )
        if not self._stop.asked.is_set():
            await self._standing.begin()
        if failure is not None:
            raise failure
        await self._let_go(is_released=True)  # before the children end, who may take their time
        await writer.leave(self._ending.left_ms(grace_ms))

    def _refusal(self) -> Stopping:
        return asked_to_stop() if self._stop.asked.is_set() else self._standing.refusal()

    async def _end_when_asked(self) -> None:
        await self._stop.asked.wait()
        self._ending.ask()

    async def _end_when_lost(self) -> None:
        why = await self._term.keep()
        _log.warning("lease lost", problem=why)
        self._ending.ask()
