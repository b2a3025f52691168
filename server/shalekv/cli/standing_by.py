"""What `shalekv serve --elect ...` runs: a server that waits for a lease, and the writer behind it.

    STANDING BY ---- elected ----> opening ----> SERVING ---- asked to stop ----> draining, release
      NOT_SERVING; calls              |             |
      are told who is elected         |             +-- lease lost: the same, without a release
        ^                             |             +-- fenced: another has opened the database
        |                             v             v
        +------ a while later --------+-------------+

The lease only decides who tries. Whoever opens the database wins an epoch and fences, as without a
lease, and that alone keeps the history right: with two that were elected, one is fenced.
"""

from __future__ import annotations

import asyncio
import os

import structlog

from shalekv.cli.process.lifecycle import asked_to_stop, role_to_its_end, start_serving
from shalekv.cli.process.shutdown import Ending, StopRequest
from shalekv.cli.writing_ground import Ground, children_of, open_writer
from shalekv.errors import (
    ManifestConflict,
    QuorumUnavailable,
    StandingBy,
    Stopping,
    StoreUnavailable,
)
from shalekv.server.election.elector import Elector, Term
from shalekv.server.election.opening import open_elector
from shalekv.server.writer import Writer
from shalekv.store.cas import CasStore

# What ends a term, and not the process: another writer, or trouble that may pass.
_ENDS_A_TERM = (
    Stopping,
    ManifestConflict,
    QuorumUnavailable,
    StoreUnavailable,
)

_log = structlog.get_logger(__name__)


async def serve_when_elected(ground: Ground, stop: StopRequest) -> None:
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
    ground: Ground, elector: Elector, standing: _Standing, stop: StopRequest
) -> None:
    while not stop.asked.is_set():
        term = None
        with stop.interrupts():
            term = await elector.campaign()
        if term is None:
            return
        try:
            await _Turn(ground, term, standing, stop).run()
        except _ENDS_A_TERM as error:
            _log.warning("stands by again", reason=error.reason, problem=str(error))
            ttl_ms = ground.settings.election.lease_ttl_ms
            with stop.interrupts():  # who took over by force shall not be fenced at once
                await ground.runtime.clock.sleep_ms(ttl_ms * ground.runtime.random.uniform(1, 2))


class _Standing:
    """The server while it is not the writer: what it tells of whoever is elected."""

    def __init__(self, ground: Ground) -> None:
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


class _Turn:
    """One term of this process as the one that tries to be the writer."""

    def __init__(self, ground: Ground, term: Term, standing: _Standing, stop: StopRequest) -> None:
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
