"""How long to wait before a request to a store is repeated, and a store that repeats reads.

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

# Told before each wait: how many attempts failed, and how the last one did.
RetryListener = Callable[[int, BaseException], None]

MAX_DOUBLINGS = 30  # keeps the number small when an outage lasts for days


def unheard(_failed_attempts: int, _error: BaseException) -> None:
    """The listener that does nothing."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_ms` to `longest_ms`, each cut by a random share of its half.

    The jitter keeps processes that failed together from coming back together.
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
        """The wait after so many failed attempts, at least 1."""
        doublings = min(failed_attempts - 1, MAX_DOUBLINGS)
        full_ms = min(self.longest_ms, self.first_ms * 2.0**doublings)
        return full_ms * random.uniform(0.5, 1.0)


DEFAULT_BACKOFF = Backoff()
DEFAULT_READ_ATTEMPTS = 5


class RefusalPolicy:
    """Decides whether a refused request is sent again, for all who ask one store.

    A store that has accepted a request of this process knows it: a refusal may pass, as while
    credentials are replaced or a permission travels through a cluster. A store that has accepted
    none yet refuses for good.
    """

    def __init__(self, sent: RequestCounts, runtime: Runtime) -> None:
        """`sent` belongs to the store: what is set there holds for all who ask it."""
        self._sent = sent
        self._clock = runtime.clock

    @contextmanager
    def opening(self, timeout_ms: float) -> Iterator[None]:
        """Repeat refused requests for `timeout_ms` inside, and for a second outside."""
        sent = self._sent
        window_ms, sent.refusals_ms = sent.refusals_ms, max(timeout_ms, sent.refusals_ms)
        try:
            yield
        finally:
            sent.refusals_ms = window_ms

    def begin(self) -> Callable[[StoreRefused], bool]:
        """A predicate for the refusals of one request, which begins now."""
        until_ms = self._clock.monotonic_ms() + self._sent.refusals_ms

        def may_pass(error: StoreRefused) -> bool:
            is_known = self._sent.was_accepted and error.may_pass
            return is_known and self._clock.monotonic_ms() < until_ms

        return may_pass

    def accepted(self) -> None:
        """Note that the store has accepted a request."""
        self._sent.was_accepted = True


async def repeat(
    attempt: Callable[[], Awaitable[T]],
    runtime: Runtime,
    backoff: Backoff,
    *,
    is_passing: Callable[[Exception, int], bool],
    listener: RetryListener,
) -> T:
    """The result of `attempt`, which is repeated as long as `is_passing` says so.

    It is called with the error and the number of failed attempts. What it declines is raised as it
    is.
    """
    failed_attempts = 0
    while True:
        try:
            return await attempt()
        except Exception as error:
            failed_attempts += 1
            if not is_passing(error, failed_attempts):
                raise
            listener(failed_attempts, error)
        await runtime.clock.sleep_ms(backoff.wait_ms(failed_attempts, runtime.random))


class RetryingStore(ObjectStore):
    """A store that repeats what is safe to repeat after `StoreUnavailable`, and then raises it.

    `StoreRefused` is repeated as `refusals` decides.

    `create` is passed on as it is: what its outcome means, `shalekv.store.cas` decides.
    """

    def __init__(
        self,
        inner: ObjectStore,
        runtime: Runtime,
        *,
        attempts: int = DEFAULT_READ_ATTEMPTS,
        backoff: Backoff = DEFAULT_BACKOFF,
        listener: RetryListener = unheard,
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
        """As the interface says; after a failure it goes on behind the last object it showed."""
        failed_attempts = 0
        is_passing = self._is_passing()
        while True:
            try:
                async for info in self._inner.list(prefix, start_after=start_after):
                    if failed_attempts:
                        failed_attempts, is_passing = 0, self._is_passing()
                    start_after = info.name
                    yield info
                self.refusals.accepted()
                return
            except (StoreUnavailable, StoreRefused) as error:
                failed_attempts += 1
                if not is_passing(error, failed_attempts):
                    raise
                self._listener(failed_attempts, error)
            wait_ms = self._backoff.wait_ms(failed_attempts, self._runtime.random)
            await self._runtime.clock.sleep_ms(wait_ms)

    async def delete(self, names: Iterable[str]) -> None:
        await self._repeat(partial(self._inner.delete, tuple(names)))

    async def now_ms(self) -> int:
        return await self._repeat(self._inner.now_ms)

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        return await self._repeat(partial(self._inner.recover, is_collected))

    async def close(self) -> None:
        await self._inner.close()

    async def _repeat(self, request: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await repeat(
                request,
                self._runtime,
                self._backoff,
                is_passing=self._is_passing(),
                listener=self._listener,
            )
        except ObjectNotFound:
            self.refusals.accepted()
            raise
        self.refusals.accepted()
        return result

    def _is_passing(self) -> Callable[[Exception, int], bool]:
        may_pass = self.refusals.begin()
        unanswered_count = 0

        def is_passing(error: Exception, _failed_attempts: int) -> bool:
            nonlocal unanswered_count
            if isinstance(error, StoreUnavailable):
                unanswered_count += 1
                return unanswered_count < self._attempts
            return isinstance(error, StoreRefused) and may_pass(error)

        return is_passing
