"""Retries of requests to a store: how long to wait, and whether to repeat a refused request.

Waiting and randomness come from the `Runtime`: in virtual time, the same seed waits the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from shalekv.errors import InvalidSetting, StoreRefused
from shalekv.runtime import Runtime
from shalekv.store.api import RequestCounts

# Requests of a database: the first wait is about as long as a request to an object store, and the
# longest spares a store that throttles, and ends soon after an outage.
RETRY_INITIAL_MS = 50
RETRY_MAX_MS = 2_000
CONNECT_TIMEOUT_MS = 5_000  # a few retransmissions of TCP: then another address may answer
MAX_DOUBLINGS = 30  # keeps the number small when an outage lasts for days


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
        """Retry refused requests for at least `timeout_ms`, while a database is opened."""
        sent = self._sent
        outside_ms = sent.refusal_retry_ms
        sent.refusal_retry_ms = max(timeout_ms, outside_ms)
        try:
            yield
        finally:
            sent.refusal_retry_ms = outside_ms

    def until_ms(self) -> float:
        """Return until when to repeat a request that begins now, by the monotonic clock."""
        return self._clock.monotonic_ms() + self._sent.refusal_retry_ms

    def is_final(self, error: Exception, until_ms: float) -> bool:
        """Return whether `error` is a refusal after which the request is not repeated.

        `until_ms` is the result of the method `until_ms` when the request began.
        """
        if not isinstance(error, StoreRefused):
            return False
        may_pass = self._sent.was_accepted and error.may_pass
        return not may_pass or self._clock.monotonic_ms() >= until_ms

    def accepted(self) -> None:
        """Record that the store has accepted a request."""
        self._sent.was_accepted = True
