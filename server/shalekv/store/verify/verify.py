"""Checks of a store, each with the guarantee that rests on it: the full run, and the short form.

`verification` runs all checks, one after another, and deletes their objects. `check_fit` is the
short form, of some 23 requests, before a store is used for a new database.
"""

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
from shalekv.store.verify.races import check_not_replaced, race
from shalekv.store.verify.reads import check_gone, check_listed, now_ms
from shalekv.store.verify.scratch import Effort, Scratch, StoreViolation, stores_of
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

# The extent of the short form.
RACERS = 4
ROUNDS = 3

NATIVE_CHECKS: Sequence[Check] = (
    Check(
        "create-races",
        "of parallel creates of one name exactly one wins, and its bytes stay",
        ONE_WINNER,
        races.create_races,
    ),
    Check(
        "second-create",
        "a create of a name that exists reports that, and replaces nothing",
        ONE_WINNER,
        races.second_create,
    ),
    Check(
        "read-after-write",
        "every process can read an object as soon as its create has ended",
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
        reads.list_after_write,
    ),
    Check("list-order", "lists are in the order of the names' bytes", IN_ORDER, reads.order),
    Check(
        "list-start-after",
        "lists begin behind the requested name",
        IN_ORDER,
        reads.start_after,
    ),
    Check(
        "list-paging",
        "lists of more than 1,000 names are complete, wherever they begin",
        NO_GAP,
        reads.paging,
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
        reads.clock,
    ),
    Check(
        "metadata",
        "user metadata is kept, or left out as a whole",
        WHOLE,
        reads.metadata,
    ),
)


def checks_of(mode: CasMode) -> Sequence[Check]:
    """Return the checks of a store with this CAS mode."""
    if mode is CasMode.NATIVE:
        return NATIVE_CHECKS
    from shalekv.store.verify.two_phase import TWO_PHASE_CHECKS  # noqa: PLC0415 - loads its stores

    return (*NATIVE_CHECKS, *TWO_PHASE_CHECKS)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check and its verdict."""

    check: Check
    verdict: Verdict


class StoreVerification:
    """The checks of one store."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self.checks: Sequence[Check] = checks_of(scratch.stores[0].cas_mode)

    async def findings(self) -> AsyncIterator[CheckResult]:
        """Run the checks; yield the result of each. Raises the errors of an unreachable store."""
        await self._scratch.list_own()
        await self._scratch.reader(0).repair()  # sends a request to the records, if there are any
        for check in self.checks:
            yield CheckResult(check, await self._verdict(check))

    async def _verdict(self, check: Check) -> Verdict:
        try:
            return await check.run(self._scratch)
        except StoreViolation as found:
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
    """Prepare checks of the store that `open_one` opens, each time with its own connections.

    Their objects are deleted at the end, also after an error; `left` is called with the names of
    those that could not be deleted.
    """
    async with stores_of(open_one, effort.racers) as stores:
        scratch = Scratch(stores, runtime, settings, effort)
        try:
            yield StoreVerification(scratch)
        finally:
            # A cancelled create may still be in flight, in another thread or at the server.
            remaining = await scratch.clear()
            if remaining:
                left(remaining)


async def check_fit(store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
    """Raise `StoreUnfit` if the store violates a requirement, by a short form of the checks.

    There is no limit on retries while the store does not answer, as when the first manifest is
    claimed. The objects of the checks are deleted.
    """
    effort = Effort(racers=RACERS, rounds=ROUNDS, create_attempts=None)
    scratch = Scratch([store], runtime, settings, effort, log_retry)
    guarantee = ONE_WINNER
    try:
        name, is_over = await check_not_replaced(scratch)
        for number in range(ROUNDS):
            await race(scratch, scratch.name(f"race-{number}"), at=0)
        guarantee = NO_GAP
        await check_listed(scratch, name)
        guarantee = NOT_BACK
        await scratch.reader(0).delete([name])
        if is_over:
            await check_gone(scratch, name, at=0)
        guarantee = TIMELY
        await now_ms(scratch, at=0)
    except StoreViolation as found:
        raise _unfit(store, found, guarantee) from found
    finally:
        with suppress(StoreError):  # objects that stay are recognised by their names, and harmless
            await scratch.delete_all()


def _unfit(store: ObjectStore, found: StoreViolation, guarantee: str) -> StoreUnfit:
    is_native = store.cas_mode is CasMode.NATIVE
    other = ", or --cas two_phase" if is_native and guarantee is ONE_WINNER else ""
    return StoreUnfit(
        store.url,
        found.operation,
        found.name,
        f"{found.problem}. The store is unfit, and no database was created, for without this there "
        f"is no {guarantee}. Use another store{other}; `shalekv store verify` tells more",
    )
