r"""The compactors of one process, one for each of its databases.

    open --> compact ---- failed ----> wait, longer each time ---> open
       \           \---- another compactor has taken over, or the disk failed ----> given up
        \---- the same

Databases share nothing but the slots of their merges: what happens to one does not hold up the
others. A process for a single database ends with its compactor, and whoever started it decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from structlog.contextvars import bound_contextvars

from shalekv.errors import ShaleError, StoreBroken, Superseded
from shalekv.jobs.compact.parts import PartRunner
from shalekv.jobs.compact.run import MergeSlots
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.settings import CompactSettings
from shalekv.store.api import ObjectStore
from shalekv.store.retry import Backoff

# Of the WAL, and as many of levels: one that a store holds up does not hold up those of others.
MERGES_MAX = 2
RETRY_MS_MAX = 60_000
CLOSE_S = 2  # leases that are not given up by then expire

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CompactedPlace:
    """The store of one database, and what works on it."""

    store: ObjectStore
    runtime: Runtime
    parts: PartRunner


class Compactors:
    """Compacts each of its databases. At most `MERGES_MAX` merges of a kind run at once."""

    def __init__(
        self,
        places: Sequence[CompactedPlace],
        settings: CompactSettings,
        *,
        hurry: asyncio.Event | None = None,
        holder: str = "compactor",
    ) -> None:
        """REQUIRES: `places` is not empty; `hurry` is given for a single database only."""
        settings = settings if len(places) == 1 else _with_shared_rate(settings)
        slots = MergeSlots(MERGES_MAX)
        self._databases = [
            _Database(place, settings, slots, hurry or asyncio.Event(), holder) for place in places
        ]

    async def run(self) -> None:
        """Compact until cancelled.

        Raises what has ended the compactor of a single database. Of several, each is begun again
        until it is given up; when all are, raises `StoreBroken` of the first whose disk failed,
        otherwise `Superseded`.
        """
        if len(self._databases) == 1:
            await self._databases[0].compact()
            return
        async with asyncio.TaskGroup() as tasks:
            kept = [tasks.create_task(database.keep()) for database in self._databases]
        ends = [each.result() for each in kept]
        raise next((end for end in ends if not isinstance(end, Superseded)), ends[0])

    async def run_once(self) -> Sequence[Exception | None]:
        """Do for each database what is due now: what has failed there, None where nothing has.

        Of several it is logged as well.
        """
        is_told = len(self._databases) > 1
        async with asyncio.TaskGroup() as tasks:
            once = [tasks.create_task(each.once(is_told=is_told)) for each in self._databases]
        return [each.result() for each in once]


class _Database:
    """One of the databases, and who its compactor was before it failed."""

    def __init__(
        self,
        place: CompactedPlace,
        settings: CompactSettings,
        slots: MergeSlots,
        hurry: asyncio.Event,
        holder: str,
    ) -> None:
        """Nothing is opened yet."""
        self._place = place
        self._settings = settings
        self._slots = slots
        self._hurry = hurry
        self._holder = holder
        self._own: CompactorId | None = None
        self._opened_ms: float | None = None  # when its compactor has taken over

    async def keep(self) -> Superseded | StoreBroken:
        """Compact, again and again whatever fails, until the database is given up: why."""
        clock, random = self._place.runtime.clock, self._place.runtime.random
        first_ms = min(self._settings.compactor.compactor_poll_ms, RETRY_MS_MAX)
        backoff, failures = Backoff(first_ms, RETRY_MS_MAX), 0
        while True:
            self._opened_ms = None
            error = await self._ended()
            if isinstance(error, Superseded | StoreBroken):
                self._log().error("database given up", reason=error.reason, problem=str(error))
                return error
            opened_ms = self._opened_ms
            if opened_ms is not None and clock.monotonic_ms() - opened_ms >= RETRY_MS_MAX:
                failures = 0
            failures += 1
            wait_ms = backoff.wait_ms(failures, random)
            self._tell(error, retry_ms=round(wait_ms))
            await clock.sleep_ms(wait_ms)

    async def once(self, *, is_told: bool) -> Exception | None:
        """Do what is due now; what has failed."""
        try:
            await self.compact(is_once=True)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            if is_told:
                self._tell(error)
            return error
        return None

    async def compact(self, *, is_once: bool = False) -> None:
        """Take over, compact, and give up the leases. Raises what ends a compactor."""
        with bound_contextvars(url=self._place.store.url):
            compactor = await Compactor.open(
                self._place.store,
                settings=self._settings,
                runtime=self._place.runtime,
                hurry=self._hurry,
                parts=self._place.parts,
                slots=self._slots,
                holder=self._holder,
                after=self._own,
            )
            self._own = compactor.own
            self._opened_ms = self._place.runtime.clock.monotonic_ms()
            try:
                await compactor.run(is_once=is_once)
            finally:
                await _close(compactor)

    async def _ended(self) -> Exception:
        try:
            await self.compact()
        except Exception as error:  # noqa: BLE001 - told, and the other databases go on
            return error
        raise AssertionError("a compactor goes on until something ends it")

    def _tell(self, error: Exception, **details: object) -> None:
        if isinstance(error, ShaleError):
            # It says all there is to know: a traceback would only hide it.
            told = {"reason": error.reason, "problem": str(error)}
            self._log().error("compactor ended by an error", **told, **details)
        else:
            ended = "compactor ended by an unexpected error"
            self._log().error(ended, exc_info=error, **details)

    def _log(self) -> structlog.stdlib.BoundLogger:
        bound: structlog.stdlib.BoundLogger = log.bind(url=self._place.store.url)
        return bound


async def _close(compactor: Compactor) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await compactor.close()
    except (ShaleError, TimeoutError) as error:
        log.debug("leases are left to expire", problem=str(error))


def _with_shared_rate(settings: CompactSettings) -> CompactSettings:
    """`compaction_rate_bytes` is for the process: each merge that may run at once has its share."""
    shared = -(-settings.compactor.compaction_rate_bytes // MERGES_MAX)  # 0 stays: no bound
    update = {"compaction_rate_bytes": shared}
    return settings.model_copy(update={"compactor": settings.compactor.model_copy(update=update)})
