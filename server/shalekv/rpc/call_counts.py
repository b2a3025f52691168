"""Statistics of calls by method: their codes, and a histogram of durations; and of refusals.

Counting costs two readings of the clock and three additions a call, so it is always on. A call is
counted when it ends; the duration of a stream is its whole life. Calls that are refused before they
begin (too many at once, shutting down) count as failures. So does a call with one reply that its
client has given up, for example when its deadline passed. A stream that its client gives up does
not: streams end like this. The clock is `time.perf_counter_ns`, since an event loop rounds its time
to milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TypeAlias

from google.protobuf.message import Message

from shalekv.errors import ShaleError
from shalekv.rpc.status import row_of
from shalekv.telemetry.histogram import Histogram
from shalekv.telemetry.metrics import Metrics
from shalekv.v1 import admin_pb2
from shalekv_wire.status import CallFailed, StatusCode

NS_PER_US = 1_000
PRINCIPALS_MAX = 10_000  # whose calls are counted until somebody asks

NowNs: TypeAlias = Callable[[], int]


class MethodCount:
    """The calls of one method, since the server began."""

    __slots__ = ("_codes", "durations_us", "failures", "method")

    def __init__(self, method: str) -> None:
        """`method` is its name, such as ``KV.Get``."""
        self.method = method
        self.durations_us = Histogram()  # of all calls
        self.failures = 0
        self._codes: Counter[str] = Counter()  # of calls that did not end with OK

    def add(self, duration_ns: int) -> None:
        """Count a call that has ended with OK."""
        self.durations_us.add(duration_ns // NS_PER_US)

    def fail(self, duration_ns: int, code: StatusCode, *, is_failure: bool = True) -> None:
        """Count a call that has ended with another code."""
        self.durations_us.add(duration_ns // NS_PER_US)
        self.failures += is_failure
        self._codes[code.name] += 1

    def codes(self) -> dict[str, int]:
        """Return the number of calls by the name of their code."""
        ok_count = self.durations_us.count - self._codes.total()
        return {StatusCode.OK.name: ok_count, **self._codes} if ok_count else dict(self._codes)

    def status(self) -> admin_pb2.CallStatus:
        """Convert to a message; empty buckets at the end of the histogram are left out."""
        buckets = self.durations_us.buckets
        used = max((number for number, calls in enumerate(buckets) if calls), default=-1)
        return admin_pb2.CallStatus(
            method=self.method,
            calls=self.durations_us.count,
            failures=self.failures,
            total_us=self.durations_us.total,
            histogram_us=buckets[: used + 1],
        )


class TimedCall:
    """Context manager that counts the stream served inside it, however it ends."""

    __slots__ = ("_began_ns", "_count", "_deadline_s", "_now_ns")

    def __init__(self, count: MethodCount, now_ns: NowNs, deadline_s: float | None) -> None:
        """Begin the call now."""
        self._count = count
        self._now_ns = now_ns
        self._deadline_s = deadline_s
        self._began_ns = now_ns()

    def __enter__(self) -> None:
        """Do nothing: the call has begun already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Count the call."""
        duration_ns = self._now_ns() - self._began_ns
        if error is None:
            self._count.add(duration_ns)
            return
        is_failure = not isinstance(error, asyncio.CancelledError)
        self._count.fail(duration_ns, code_of(error, self._deadline_s), is_failure=is_failure)


class CallCounts:
    """The counts of all methods of a server, and of refusals."""

    def __init__(self, now_ns: NowNs = time.perf_counter_ns) -> None:
        """Begin without counts."""
        self.now_ns = now_ns
        # Of calls and operations, by the reason of their error: one of `shalekv.errors`.
        self.refusals: Counter[str] = Counter()
        self.by_principal = PrincipalCalls()
        self._counts: dict[str, MethodCount] = {}

    def __iter__(self) -> Iterator[MethodCount]:
        """Yield the counts of the methods that were called, by name."""
        for _, count in sorted(self._counts.items()):
            if count.durations_us.count:
                yield count

    def of(self, method: str) -> MethodCount:
        """Return the count of the method with this name."""
        return self._counts.setdefault(method, MethodCount(method))

    def of_request(self, request_type: type[Message]) -> MethodCount:
        """Return the count of the method that takes requests of this type."""
        return self.of(method_of(request_type))

    def collect(self, metrics: Metrics) -> None:
        """Add the counts of the methods that were called, and of refusals."""
        for count in self:
            for code, calls in count.codes().items():
                metrics.add("calls", calls, count.method, code)
            metrics.add_histogram("call_duration_seconds", count.durations_us, count.method)
        for reason, refusals in self.refusals.items():
            metrics.add("refusals", refusals, reason)

    def statuses(self) -> Iterator[admin_pb2.CallStatus]:
        """Yield the counts of the methods that were called, by name, as messages."""
        return (count.status() for count in self)


class PrincipalCalls:
    """Calls and operations by principal, since somebody has taken the counts.

    Most calls come from the principal of the call before, which costs an addition.
    """

    __slots__ = ("_counts", "_current", "repeats")

    def __init__(self) -> None:
        """Begin without calls."""
        self.repeats = 0  # further calls of the current principal
        self._current = ""
        self._counts = Counter[str]()

    def begin(self, principal: str) -> None:
        """Count a call of `principal`, who is the current one from now on."""
        self._fold()
        self._current, self.repeats = principal, 1

    def add(self, principal: str, calls: int = 1) -> None:
        """Count calls of `principal`. If nobody takes the counts of so many, they are dropped."""
        if len(self._counts) >= PRINCIPALS_MAX:
            self._counts.clear()
        self._counts[principal] += calls

    def take(self) -> Mapping[str, int]:
        """Return the counts, and begin anew."""
        self._fold()
        counts, self._counts = self._counts, Counter[str]()
        return counts

    def _fold(self) -> None:
        if self.repeats:
            self.add(self._current, self.repeats)
            self.repeats = 0


def code_of(error: BaseException, deadline_s: float | None = None) -> StatusCode:
    """Return the code of a call that has ended with `error`, and had this deadline.

    A call that was cancelled by then has ended because of the deadline.
    """
    if isinstance(error, ShaleError):
        return row_of(type(error)).code
    if isinstance(error, CallFailed):
        return error.code
    if isinstance(error, asyncio.CancelledError):
        is_late = deadline_s is not None and time.monotonic() >= deadline_s
        return StatusCode.DEADLINE_EXCEEDED if is_late else StatusCode.CANCELLED
    return StatusCode.INTERNAL


def method_of(request_type: type[Message]) -> str:
    """Return the name of the method that takes requests of this type, such as ``KV.Get``."""
    wanted = request_type.DESCRIPTOR
    for service in wanted.file.services_by_name.values():
        for method in service.methods:
            if method.input_type is wanted:
                return f"{service.name}.{method.name}"
    raise KeyError(f"no method takes a {wanted.full_name}")
