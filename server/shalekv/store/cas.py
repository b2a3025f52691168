"""A store as manifest and log use it: reads that are repeated, and claims that are resolved."""

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
    repeat,
    unheard,
)

# --- claim
# Compare-and-swap to its end: whose object is it that has this name now?
#
# `create` has three outcomes and this has two. The rule (protocol, "Objects"): whatever is not
# plainly ours is read and compared, before any epoch is; what nobody answered is tried again with
# the same bytes.


@dataclass(frozen=True, slots=True)
class Claimed:
    """The object that has the name is the caller's, and durable."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The object that has the name is a rival's, and durable: these are its bytes.

    If the outcome of an attempt was unknown, ours may have stood there before: collected since,
    it made room for the rival's. Who deletes objects of this kind knows whether that can be.
    """

    data: bytes
    is_certain: bool = True  # no attempt of ours can have created the object


ClaimOutcome = Claimed | Taken


class _Unresolved(Exception):
    """This attempt found no object to compare with."""

    def __init__(self, message: str, *, problem: str, is_certain: bool) -> None:
        """`problem` is that of the store alone; `is_certain`: it cannot have created one."""
        super().__init__(message)
        self.problem = problem
        self.is_certain = is_certain


async def claim(
    store: ObjectStore,
    name: str,
    data: bytes,
    *,
    runtime: Runtime,
    metadata: Mapping[str, str] = NO_METADATA,
    backoff: Backoff = DEFAULT_BACKOFF,
    listener: RetryListener = unheard,
    may_pass: Callable[[StoreRefused], bool] = lambda _: False,
) -> ClaimOutcome:
    """Create `name` with `data` unless a rival has; repeated until it is known who has it.

    REQUIRES: `data` holds a write id that was drawn for this name and these bytes. Only so do
    identical bytes mean "ours": a lost reply of our own success is no rival, and a rival that
    writes the same is none of us.

    There is no deadline, since giving up on a slot would leave a gap or a doubt (I1, I4): the
    owner cancels when it no longer cares, and the outcome is then unknown. `listener` hears of
    each failed attempt. Raises `StoreBroken` as `create` does: the outcome is unknown as well, and
    as it is after `StoreRefused`, which is raised unless the refusal `may_pass`.

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
            return Taken(outcome.data, is_certain=False)
        return outcome

    def is_passing(error: Exception, _failed_attempts: int) -> bool:
        if isinstance(error, StoreRefused):
            return may_pass(error)
        return isinstance(error, StoreUnavailable | _Unresolved)

    return await repeat(attempt, runtime, backoff, is_passing=is_passing, listener=listener)


async def _attempt(
    store: ObjectStore, name: str, data: bytes, metadata: Mapping[str, str]
) -> ClaimOutcome:
    """One create and, unless that says it all, one read.

    A `StoreUnavailable` of the read leads to another create as well. That is harmless: an
    object that is there is not replaced, and what is ours is recognised again.
    """
    outcome = await store.create(name, data, metadata)
    if isinstance(outcome, Created):
        return Claimed()
    is_certain = isinstance(outcome, Exists)
    if isinstance(outcome, Unknown):
        problem = outcome.cause
        absent = f"nobody knows whether {name} was created, and it is not there: {problem}"
    else:
        problem = absent = f"{name} existed, and was gone when it was read"
    try:
        found = await store.get(name)
    except ObjectNotFound as error:
        # Gone after `Exists` means collected, and the next attempt may create the object a
        # second time. Nothing is lost by that. A WAL slot that a fence run took is never
        # collected (F1), so a stalled writer fails there for ever; a collected slot lies
        # before the run, where our write, had it landed, was replayed and counts, and where
        # the object that we make now is never read. And of a manifest, a create proves
        # nothing before a list shows it as the highest (F2).
        raise _Unresolved(absent, problem=problem, is_certain=is_certain) from error
    except (StoreUnavailable, StoreRefused) as error:
        raise _Unresolved(str(error), problem=error.problem, is_certain=is_certain) from error
    return Claimed() if found.data == data else Taken(found.data, is_certain)


# --- cas


log = structlog.get_logger()


class CasStore:
    """One database's store with the runtime and the settings for requests to it."""

    def __init__(self, store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
        """`store` is asked once per attempt; `reads` repeats."""
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
        """Create `name` unless a rival has, to its end: see `shalekv.store.cas.claim`.

        A refusal is repeated as `refusals` says; if `is_patient`, until somebody has mended its
        cause. `listener` hears of failed attempts, which are logged in any case.
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

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        """Complete what crashed creates have left: see `ObjectStore.recover`."""
        recovered = await self.reads.recover(is_collected)
        if recovered != Recovered():
            log.info("creates recovered", url=self.url, **asdict(recovered))
        return recovered

    async def pause(self, failed_attempts: int) -> None:
        """Wait before a conflict is met again; `failed_attempts` is at least 1."""
        wait_ms = self.backoff.wait_ms(failed_attempts, self.runtime.random)
        await self.runtime.clock.sleep_ms(wait_ms)


def log_retry(failed_attempts: int, error: BaseException) -> None:
    """The listener that says in the log what is repeated, and why; less often as it goes on."""
    if failed_attempts & (failed_attempts - 1):  # no power of two
        return
    log.warning("store request repeated", failed_attempts=failed_attempts, error=str(error))
