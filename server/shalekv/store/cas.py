"""Compare-and-swap on one object: `claim`, and `CasStore`, the store as manifest and log use it.

`create` has three outcomes, `claim` has two: the object of this name is ours, or a rival's. The
rule (`server/docs/protocol.md`, "Objects"): unless the outcome of a create is plainly ours, the
object is read and compared before any epoch is; if there is no answer, the same bytes are sent
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import structlog

from shalekv.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    Created,
    Exists,
    IsCollected,
    ObjectStore,
    Recovered,
    Unknown,
    nothing_is_collected,
)
from shalekv.store.retry import (
    DEFAULT_BACKOFF,
    Backoff,
    RetryingStore,
    RetryListener,
    no_listener,
    repeat,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Claimed:
    """The object of this name is the caller's, and durable."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The object of this name is a rival's, and durable: these are its bytes.

    If not `is_certain`, the outcome of an earlier attempt was unknown: our object may have been
    created then and collected since, before the rival created its own. Whether that is possible
    depends on when objects of this kind are collected, which the caller knows.
    """

    data: bytes
    is_first_owner: bool = True  # no attempt of ours can have created the object


ClaimOutcome = Claimed | Taken


async def claim(
    store: ObjectStore,
    name: str,
    data: bytes,
    *,
    runtime: Runtime,
    metadata: Mapping[str, str] = NO_METADATA,
    backoff: Backoff = DEFAULT_BACKOFF,
    listener: RetryListener = no_listener,
    may_pass: Callable[[StoreRefused], bool] = lambda _: False,
) -> ClaimOutcome:
    """Create `name` with `data` unless a rival has; retry until the owner of the name is known.

    REQUIRES: `data` holds a write id that was drawn for this name and these bytes. Only then do
    identical bytes mean "ours": a lost reply to our own success is not taken for a rival, and the
    same contents written by a rival are not taken for ours.

    There is no deadline, since giving up on a slot would leave a gap or a doubt (I1, I4): the
    owner cancels when it no longer needs the result, and the outcome is then unknown. `listener`
    is called after each failed attempt. Raises `StoreRefused` unless `may_pass` returns true for
    it, and `StoreBroken` as `create` does; the outcome is unknown after both.

    Whether an object that is ours *counts* is for the caller to find out: see F1 and F2.
    """
    is_certain = True

    async def attempt() -> ClaimOutcome:
        nonlocal is_certain
        try:
            outcome = await _attempt(store, name, data, metadata)
        except _Unresolved as unresolved:
            is_certain = is_certain and unresolved.is_certain
            if isinstance(unresolved.__cause__, StoreRefused):
                raise unresolved.__cause__ from None
            raise
        if isinstance(outcome, Taken) and not is_certain:
            return Taken(outcome.data, is_first_owner=False)
        return outcome

    def should_retry(error: Exception, _failed_attempts: int) -> bool:
        if isinstance(error, StoreRefused):
            return may_pass(error)
        return isinstance(error, StoreUnavailable | _Unresolved)

    return await repeat(attempt, runtime, backoff, should_retry=should_retry, listener=listener)


class _Unresolved(Exception):
    """An attempt to claim a name that ended without an object to compare with."""

    def __init__(self, message: str, *, problem: str, is_certain: bool) -> None:
        """`problem` is the store's part of the message.

        `is_certain`: this attempt cannot have created an object.
        """
        super().__init__(message)
        self.problem = problem
        self.is_certain = is_certain


async def _attempt(
    store: ObjectStore, name: str, data: bytes, metadata: Mapping[str, str]
) -> ClaimOutcome:
    """Send one create and, unless it succeeds, one read.

    After a `StoreUnavailable` of the read the create is sent again, too. That is harmless: it
    replaces no object, and our own object is recognised by its bytes.
    """
    outcome = await store.create(name, data, metadata)
    if isinstance(outcome, Created):
        return Claimed()
    is_certain = isinstance(outcome, Exists)
    if isinstance(outcome, Unknown):
        problem = outcome.cause
        absent = f"it is unknown whether {name} was created, and it is not there: {problem}"
    else:
        problem = absent = f"{name} existed, and was gone when it was read"
    try:
        found = await store.get(name)
    except ObjectNotFound as error:
        # Gone after `Exists` means collected, and the next attempt may create the object a
        # second time. Nothing is lost by that. A WAL slot of a fence run is never collected
        # (F1), so a stalled writer keeps failing there. A collected slot lies before the run: if
        # our write had been created there, it was replayed and counts, and the object that we
        # create now is never read. For a manifest, a create proves nothing before a list shows
        # it as the highest (F2).
        raise _Unresolved(absent, problem=problem, is_certain=is_certain) from error
    except (StoreUnavailable, StoreRefused) as error:
        raise _Unresolved(str(error), problem=error.problem, is_certain=is_certain) from error
    return Claimed() if found.data == data else Taken(found.data, is_certain)


class CasStore:
    """The store of one database, with the runtime and the settings for requests to it.

    `claim` and `repair` change it; `reads` is the same store with reads that are retried.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
        """`store` sends one request for each attempt."""
        self.runtime = runtime
        self.settings = settings
        self.backoff = Backoff(settings.retry_initial_ms, settings.retry_max_ms)
        self.url = store.url
        self.cas_mode = store.cas_mode
        self.sent = store.sent
        retrying = RetryingStore(
            store,
            runtime,
            attempts=settings.read_attempts,
            backoff=self.backoff,
            listener=log_retry,
        )
        self.reads: ObjectStore = retrying
        self.refusals = retrying.refusals
        self._store = store

    async def claim(
        self,
        name: str,
        data: bytes,
        metadata: Mapping[str, str] = NO_METADATA,
        *,
        is_patient: bool = False,
        listener: RetryListener | None = None,
    ) -> ClaimOutcome:
        """Create `name` unless a rival has; retry until its owner is known: see `claim` above.

        A refused request is retried as `refusals` decides; if `is_patient`, until an operator has
        fixed the cause. Failed attempts are logged, and `listener` is called for each.
        """

        def failed(failed_attempts: int, error: BaseException) -> None:
            log_retry(failed_attempts, error)
            if listener is not None:
                listener(failed_attempts, error)

        outcome = await claim(
            self._store,
            name,
            data,
            runtime=self.runtime,
            metadata=metadata,
            backoff=self.backoff,
            listener=failed,
            may_pass=(lambda _: True) if is_patient else self.refusals.begin(),
        )
        self.refusals.accepted()
        return outcome

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        """Complete creates that crashed half-way, and log it: see `ObjectStore.repair`."""
        recovered = await self.reads.repair(is_collected)
        if recovered != Recovered():
            log.info("creates recovered", url=self.url, **asdict(recovered))
        return recovered

    async def pause(self, failed_attempts: int) -> None:
        """Wait before the next attempt after a conflict; `failed_attempts` is at least 1."""
        wait_ms = self.backoff.wait_ms(failed_attempts, self.runtime.random)
        await self.runtime.clock.sleep_ms(wait_ms)


def log_retry(failed_attempts: int, error: BaseException) -> None:
    """Log that a request is repeated, and why: a `RetryListener`.

    Only the attempts that are powers of two are logged, so that a long outage fills no log.
    """
    if failed_attempts & (failed_attempts - 1):  # no power of two
        return
    log.warning("store request repeated", failed_attempts=failed_attempts, error=str(error))
