"""What happened between two statuses of a process: calls, requests, use of caches, by the second.

The time in between is that of the process itself. Of a process that was started again, or was seen
once, it is all since its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shalekv_client import CacheStatus, CallStatus, Status
from shalekv_client.process_status import percentile


@dataclass(frozen=True, slots=True)
class CallRate:
    """The calls of one method, or of several together."""

    method: str
    calls: float  # a second
    failures: float  # a second
    p50_us: float | None  # None: there was no call
    p99_us: float | None


@dataclass(frozen=True, slots=True)
class StoreRate:
    """The requests of one kind to the object store."""

    operation: str
    folder: str
    requests: float  # a second
    failures: float  # a second
    bytes: float  # a second


@dataclass(frozen=True, slots=True)
class CacheRate:
    """How a cache was used."""

    hit_rate: float | None  # None: nobody asked
    fetched_bytes: float  # a second


# Streams count at their end, with their whole life: nobody waits for so long.
_STREAMS = frozenset({"KV.Session", "KV.Watch"})
_OWN = "Admin.Status"  # what this view asks by itself


class Between:
    """The differences of two statuses of one process."""

    def __init__(self, before: Status | None, after: Status) -> None:
        """`before` is None, or that of a process that has ended: then all counts."""
        if before is not None and before.uptime_ms >= after.uptime_ms:
            before = None
        self.before = before
        self._after = after
        begin_ms = 0 if before is None else before.uptime_ms
        self.seconds = max(1, after.uptime_ms - begin_ms) / 1000.0

    def rate(self, after: int, before: int | None) -> float:
        """Of a counter, a second."""
        return max(0, after - (before or 0)) / self.seconds

    def calls(self) -> list[CallRate]:
        """Of each method that was called, those with the most calls first."""
        found = [self._call_rate(each.method, [each]) for each in self._calls() if each.calls]
        return sorted(found, key=lambda each: (-each.calls, each.method))

    def all_calls(self) -> CallRate:
        """Of all of them together, without streams and what asks for statuses."""
        ignored = _STREAMS | {_OWN}
        return self._call_rate("all", [c for c in self._calls() if c.method not in ignored])

    def requests(self) -> list[StoreRate]:
        """Of each kind that was sent, the most first."""
        earlier = self.before.store_requests if self.before else ()
        begun = {(each.operation, each.folder): each for each in earlier}
        found = []
        for each in self._after.store_requests:
            old = begun.get((each.operation, each.folder))
            rate = StoreRate(
                each.operation,
                each.folder,
                self.rate(each.requests, old.requests if old else None),
                self.rate(each.failures, old.failures if old else None),
                self.rate(each.bytes, old.bytes if old else None),
            )
            if rate.requests:
                found.append(rate)
        return sorted(found, key=lambda each: (-each.requests, each.operation, each.folder))

    def cache(self, after: CacheStatus, before: CacheStatus | None) -> CacheRate:
        """Of one cache."""
        known = before if self.before is not None else None
        hits = after.hits - (known.hits if known else 0)
        misses = after.misses - (known.misses if known else 0)
        asked = hits + misses
        fetched = self.rate(after.fetched_bytes, known.fetched_bytes if known else None)
        return CacheRate(hits / asked if asked > 0 else None, fetched)

    def _calls(self) -> Iterator[CallStatus]:
        begun = {each.method: each for each in (self.before.calls if self.before else ())}
        for each in self._after.calls:
            yield each.since(begun.get(each.method))

    def _call_rate(self, method: str, calls: Sequence[CallStatus]) -> CallRate:
        longest = max((len(each.histogram_us) for each in calls), default=0)
        histogram = [
            sum(each.histogram_us[number] for each in calls if number < len(each.histogram_us))
            for number in range(longest)
        ]
        return CallRate(
            method,
            sum(each.calls for each in calls) / self.seconds,
            sum(each.failures for each in calls) / self.seconds,
            None if method in _STREAMS else percentile(histogram, 0.5),
            None if method in _STREAMS else percentile(histogram, 0.99),
        )
