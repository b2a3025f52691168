"""Retries of requests to a store: backoff, the policy for refusals, and a store that retries reads.

Waiting and randomness come from the `Runtime`: in virtual time, the same seed waits the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

from shalekv.errors import InvalidSetting, ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.runtime import Runtime
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Recovered,
    RequestCounts,
    StoredObject,
    nothing_is_collected,
)

T = TypeVar("T")

# Called before each wait with the number of failed attempts and the error of the last one.
RetryListener = Callable[[int, BaseException], None]

MAX_DOUBLINGS = 30  # keeps the number small when an outage lasts for days


def no_listener(_failed_attempts: int, _error: BaseException) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_ms` to `longest_ms`, each shortened at random by up to a half.

    The jitter keeps processes that failed together from retrying together.
    """

    first_ms: float = 20.0
    longest_ms: float = 5_000.0

    def __post_init__(self) -> None:
        """Raise `InvalidSetting` when the waits cannot double."""
        if not 0 < self.first_ms <= self.longest_ms:
            raise InvalidSetting(
                f"backoff from {self.first_ms} to {self.longest_ms} ms: the first wait must be "
                "positive, and not longer than the longest"
            )

    def wait_ms(self, failed_attempts: int, random: Random) -> float:
        """Draw the wait after so many failed attempts, of which there is at least one."""
        doublings = min(failed_attempts - 1, MAX_DOUBLINGS)
        full_ms = min(self.longest_ms, self.first_ms * 2.0**doublings)
        return full_ms * random.uniform(0.5, 1.0)


DEFAULT_BACKOFF = Backoff()
DEFAULT_READ_ATTEMPTS = 5


class RefusalPolicy:
    """Decides whether a refused request is sent again; one policy for all users of a store.

    Once a store has accepted a request of this process, a later refusal may be transient: while
    credentials are replaced, or a permission spreads through a cluster. Such a refusal is retried
    for a while. A refusal by a store that has not accepted any request yet is final.
    """

    def __init__(self, sent: RequestCounts, runtime: Runtime) -> None:
        """`sent` belongs to the store, so that all users of the store share its state."""
        self._sent = sent
        self._clock = runtime.clock

    @contextmanager
    def opening(self, timeout_ms: float) -> Iterator[None]:
        """Retry refused requests for at least `timeout_ms` inside this context."""
        sent = self._sent
        outside_ms = sent.refusal_retry_ms
        sent.refusal_retry_ms = max(timeout_ms, outside_ms)
        try:
            yield
        finally:
            sent.refusal_retry_ms = outside_ms

    def begin(self) -> Callable[[StoreRefused], bool]:
        """Begin a request: return the predicate that says whether to retry after a refusal."""
        until_ms = self._clock.monotonic_ms() + self._sent.refusal_retry_ms

        def may_pass(error: StoreRefused) -> bool:
            is_known = self._sent.was_accepted and error.may_pass
            return is_known and self._clock.monotonic_ms() < until_ms

        return may_pass

    def accepted(self) -> None:
        """Record that the store has accepted a request."""
        self._sent.was_accepted = True


async def repeat(
    attempt: Callable[[], Awaitable[T]],
    runtime: Runtime,
    backoff: Backoff,
    *,
    should_retry: Callable[[Exception, int], bool],
    listener: RetryListener,
) -> T:
    """Return the result of `attempt`, repeating it as long as `should_retry` returns true.

    `should_retry` gets the error and the number of failed attempts. An error that it declines is
    raised unchanged.
    """
    failed_attempts = 0
    while True:
        try:
            return await attempt()
        except Exception as error:
            failed_attempts += 1
            if not should_retry(error, failed_attempts):
                raise
            listener(failed_attempts, error)
        await runtime.clock.sleep_ms(backoff.wait_ms(failed_attempts, runtime.random))


class RetryingStore(ObjectStore):
    """A store that repeats failed requests, as far as that is safe.

    The last of `attempts` that end in `StoreUnavailable` is raised. `StoreRefused` is retried as
    `refusals` decides. `create` is sent once: `shalekv.store.cas` resolves its outcome and
    repeats it.
    """

    def __init__(
        self,
        inner: ObjectStore,
        runtime: Runtime,
        *,
        attempts: int = DEFAULT_READ_ATTEMPTS,
        backoff: Backoff = DEFAULT_BACKOFF,
        listener: RetryListener = no_listener,
    ) -> None:
        if attempts < 1:
            raise InvalidSetting(f"{attempts} attempts at a read: there must be one at least")
        self.url = inner.url
        self.sent = inner.sent
        self.cas_mode = inner.cas_mode
        self._inner = inner
        self._runtime = runtime
        self._attempts = attempts
        self._backoff = backoff
        self._listener = listener
        self.refusals = RefusalPolicy(inner.sent, runtime)

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        return await self._inner.create(name, data, metadata)

    async def get(self, name: str) -> StoredObject:
        return await self._repeat(partial(self._inner.get, name))

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        return await self._repeat(partial(self._inner.get_range, name, offset, length))

    async def head(self, name: str) -> ObjectInfo:
        return await self._repeat(partial(self._inner.head, name))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """List as `ObjectStore.list`; after a failure, continue behind the last yielded object."""
        failed_attempts = 0
        should_retry = self._should_retry()
        while True:
            try:
                async for info in self._inner.list(prefix, start_after=start_after):
                    if failed_attempts:
                        failed_attempts, should_retry = 0, self._should_retry()
                    start_after = info.name
                    yield info
                self.refusals.accepted()
                return
            except (StoreUnavailable, StoreRefused) as error:
                failed_attempts += 1
                if not should_retry(error, failed_attempts):
                    raise
                self._listener(failed_attempts, error)
            wait_ms = self._backoff.wait_ms(failed_attempts, self._runtime.random)
            await self._runtime.clock.sleep_ms(wait_ms)

    async def delete(self, names: Iterable[str]) -> None:
        await self._repeat(partial(self._inner.delete, tuple(names)))

    async def now_ms(self) -> int:
        return await self._repeat(self._inner.now_ms)

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        return await self._repeat(partial(self._inner.repair, is_collected))

    async def close(self) -> None:
        await self._inner.close()

    async def _repeat(self, request: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await repeat(
                request,
                self._runtime,
                self._backoff,
                should_retry=self._should_retry(),
                listener=self._listener,
            )
        except ObjectNotFound:
            self.refusals.accepted()
            raise
        self.refusals.accepted()
        return result

    def _should_retry(self) -> Callable[[Exception, int], bool]:
        may_pass = self.refusals.begin()
        unanswered_count = 0

        def should_retry(error: Exception, _failed_attempts: int) -> bool:
            nonlocal unanswered_count
            if isinstance(error, StoreUnavailable):
                unanswered_count += 1
                return unanswered_count < self._attempts
            return isinstance(error, StoreRefused) and may_pass(error)

        return should_retry
