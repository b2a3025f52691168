"""Statistics of calls by method: count, failures, and a histogram of durations.

Counting costs two readings of the clock and four additions a call, so it is always on. A call is
counted when it ends; the duration of a stream is its whole life. Calls that are refused before they
begin (too many at once, shutting down) count as failures. So does a call with one reply that its
client has given up, for example when its deadline passed. A stream that its client gives up does
not: streams end like this. The clock is `time.perf_counter_ns`, since an event loop rounds its time
to milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeAlias

from google.protobuf.message import Message

from shalekv.v1 import admin_pb2

# Bucket n counts durations of 2**n us and more; the last one, from 36 minutes, has no upper bound.
BUCKET_COUNT = 32

_NS_PER_US = 1_000

NowNs: TypeAlias = Callable[[], int]


class MethodCount:
    """The calls of one method, since the server began."""

    __slots__ = ("calls", "failures", "histogram", "method", "total_us")

    def __init__(self, method: str) -> None:
        """`method` is its name, such as ``KV.Get``."""
        self.method = method
        self.calls = 0
        self.failures = 0
        self.total_us = 0
        self.histogram = [0] * BUCKET_COUNT

    def add(self, duration_ns: int, *, has_failed: bool) -> None:
        """Count a call that has ended."""
        duration_us = duration_ns // _NS_PER_US
        self.calls += 1
        self.failures += has_failed
        self.total_us += duration_us
        bucket = duration_us.bit_length() - 1
        self.histogram[0 if bucket < 0 else min(bucket, BUCKET_COUNT - 1)] += 1

    def status(self) -> admin_pb2.CallStatus:
        """Convert to a message; empty buckets at the end of the histogram are left out."""
        used = max((number for number, calls in enumerate(self.histogram) if calls), default=-1)
        return admin_pb2.CallStatus(
            method=self.method,
            calls=self.calls,
            failures=self.failures,
            total_us=self.total_us,
            histogram_us=self.histogram[: used + 1],
        )


class TimedCall:
    """Context manager that counts the stream served inside it, however it ends."""

    __slots__ = ("_began_ns", "_count", "_now_ns")

    def __init__(self, count: MethodCount, now_ns: NowNs) -> None:
        """Begin the call now."""
        self._count = count
        self._now_ns = now_ns
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
        has_failed = kind is not None and not issubclass(kind, asyncio.CancelledError)
        self._count.add(self._now_ns() - self._began_ns, has_failed=has_failed)


class CallCounts:
    """The counts of all methods of a server."""

    def __init__(self, now_ns: NowNs = time.perf_counter_ns) -> None:
        """Begin without counts."""
        self.now_ns = now_ns
        self._counts: dict[str, MethodCount] = {}

    def of(self, method: str) -> MethodCount:
        """Return the count of the method with this name."""
        return self._counts.setdefault(method, MethodCount(method))

    def of_request(self, request_type: type[Message]) -> MethodCount:
        """Return the count of the method that takes requests of this type."""
        return self.of(method_of(request_type))

    def statuses(self) -> Iterator[admin_pb2.CallStatus]:
        """Yield the counts of the methods that were called, by name."""
        for _, count in sorted(self._counts.items()):
            if count.calls:
                yield count.status()


def method_of(request_type: type[Message]) -> str:
    """Return the name of the method that takes requests of this type, such as ``KV.Get``."""
    wanted = request_type.DESCRIPTOR
    for service in wanted.file.services_by_name.values():
        for method in service.methods:
            if method.input_type is wanted:
                return f"{service.name}.{method.name}"
    raise KeyError(f"no method takes a {wanted.full_name}")
