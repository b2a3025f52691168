"""Runs checks of a store, one after another, and clears up behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from shalekv.errors import ObjectNotFound, StoreError, StoreUnfit
from shalekv.protocol.manifest import CasMode
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import log_retry
from shalekv.store.verify import races, reads
from shalekv.store.verify import reads as listing
from shalekv.store.verify import reads as moments
from shalekv.store.verify.races import race, refused
from shalekv.store.verify.reads import gone, now_ms, shown
from shalekv.store.verify.scratch import Effort, NotKept, Scratch, stores_of
from shalekv.store.verify.verdict import (
    DURABLE,
    IN_ORDER,
    NO_GAP,
    NOT_BACK,
    ONE_WINNER,
    TIMELY,
    WHOLE,
    Check,
    CheckFailed,
    Unanswered,
    Verdict,
)

# --- checks
# All checks of a store: what each proves, and which guarantee rests on it.


NATIVE_CHECKS: Sequence[Check] = (
    Check(
        "create-races",
        "of parallel creates of one name exactly one wins, and its bytes stay",
        ONE_WINNER,
        races.create_races,
    ),
    Check(
        "second-create",
        "a create of a name that exists is told so, and replaces nothing",
        ONE_WINNER,
        races.second_create,
    ),
    Check(
        "read-after-write",
        "an object is read by everybody as soon as its create has ended",
        DURABLE,
        reads.read_after_write,
    ),
    Check(
        "read-after-delete",
        "an object is gone as soon as its delete has ended; to delete nothing is no error",
        NOT_BACK,
        reads.read_after_delete,
    ),
    Check(
        "list-after-write",
        "lists show at once what was created, and no more what was deleted",
        NO_GAP,
        listing.list_after_write,
    ),
    Check("list-order", "lists are in the order of the names' bytes", IN_ORDER, listing.order),
    Check(
        "list-start-after",
        "lists begin behind the name they are told",
        IN_ORDER,
        listing.start_after,
    ),
    Check(
        "list-paging",
        "lists of more than 1,000 names are complete, wherever they begin",
        NO_GAP,
        listing.paging,
    ),
    Check("ranged-reads", "ranges are exact at the edges of objects", WHOLE, reads.ranges),
    Check("empty-object", "objects without bytes exist", ONE_WINNER, reads.empty_object),
    Check(
        "large-object",
        "objects as large as SSTs come back whole, and are not replaced",
        WHOLE,
        reads.large_object,
    ),
    Check(
        "store-clock",
        "the store tells its time, by which it dates its objects, and does not go back",
        TIMELY,
        moments.clock,
    ),
    Check(
        "metadata",
        "user metadata is kept, or left out as a whole",
        WHOLE,
        reads.metadata,
    ),
)


def checks_of(mode: CasMode) -> Sequence[Check]:
    """What a store must keep whose creates are decided in this way."""
    if mode is CasMode.NATIVE:
        return NATIVE_CHECKS
    from shalekv.store.verify.two_phase import TWO_PHASE_CHECKS  # noqa: PLC0415 - loads its stores

    return (*NATIVE_CHECKS, *TWO_PHASE_CHECKS)


# --- verify


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check came to."""

    check: Check
    verdict: Verdict


class StoreVerification:
    """The checks of one store."""

    def __init__(self, ground: Scratch) -> None:
        self._ground = ground
        self.checks: Sequence[Check] = checks_of(ground.stores[0].cas_mode)

    async def findings(self) -> AsyncIterator[CheckResult]:
        """What each check came to. Raises the errors of a store that cannot be reached at all."""
        await self._ground.listed()
        await self._ground.reader(0).recover()  # asks the records, where there are any
        for check in self.checks:
            yield CheckResult(check, await self._verdict(check))

    async def _verdict(self, check: Check) -> Verdict:
        try:
            return await check.run(self._ground)
        except NotKept as found:
            return CheckFailed(str(found))
        except ObjectNotFound as error:
            return CheckFailed(str(error))
        except StoreError as error:
            return Unanswered(str(error))


@asynccontextmanager
async def verification(
    open_one: Callable[[], ObjectStore],
    runtime: Runtime,
    settings: StoreSettings,
    effort: Effort,
    left: Callable[[Sequence[str]], None],
) -> AsyncIterator[StoreVerification]:
    """Checks of the store that `open_one` opens, each time with connections of its own.

    What they make is deleted at the end, however it comes; `left` hears what could not be.
    """
    async with stores_of(open_one, effort.racers) as stores:
        ground = Scratch(stores, runtime, settings, effort)
        try:
            yield StoreVerification(ground)
        finally:
            # A cancelled create may still be on its way in another thread, or at the server.
            remaining = await ground.clear()
            if remaining:
                left(remaining)


# --- fit
# The short form of the checks: some 23 requests, before a store is trusted with a database.


RACERS = 4
ROUNDS = 3


async def check_fit(store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
    """Raise `StoreUnfit` where the store shows that it does not keep what a database rests on.

    It is waited for as long as it takes to be answered, as when the first manifest is claimed. What
    is made is deleted again.
    """
    effort = Effort(racers=RACERS, rounds=ROUNDS, create_attempts=None)
    ground = Scratch([store], runtime, settings, effort, log_retry)
    guarantee = ONE_WINNER
    try:
        name, is_over = await refused(ground)
        for number in range(ROUNDS):
            await race(ground, ground.name(f"race-{number}"), at=0)
        guarantee = NO_GAP
        await shown(ground, name)
        guarantee = NOT_BACK
        await ground.reader(0).delete([name])
        if is_over:
            await gone(ground, name, at=0)
        guarantee = TIMELY
        await now_ms(ground, at=0)
    except NotKept as found:
        raise _unfit(store, found, guarantee) from found
    finally:
        with suppress(StoreError):  # what stays is told by its name, and disturbs nobody
            await ground.delete_all()


def _unfit(store: ObjectStore, found: NotKept, guarantee: str) -> StoreUnfit:
    is_native = store.cas_mode is CasMode.NATIVE
    other = ", or --cas two_phase" if is_native and guarantee is ONE_WINNER else ""
    return StoreUnfit(
        store.url,
        found.operation,
        found.name,
        f"{found.problem}. The store is unfit, and no database was created, for without this there "
        f"is no {guarantee}. Use another store{other}; `shalekv store verify` tells more",
    )
