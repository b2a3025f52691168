"""How often each method was called, how often in vain, and how long it took.

What a call costs here is a reading of the clock at both ends and four additions, so that counting
may always be on. A call counts when it is over: a stream with its whole life. Calls that are
refused at the door (too many at once, shutting down) count as failures. So does a call with one
reply that its client gave up, as when its deadline passed; to give up a stream is how streams end,
and no failure. The time is that of the machine: a loop rounds its own to milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

from google.protobuf.message import Message

from shalekv.v1 import admin_pb2

# The last of the histogram also has what took longer: 36 minutes.
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
        """Count a call that is over."""
        duration_us = duration_ns // _NS_PER_US
        self.calls += 1
        self.failures += has_failed
        self.total_us += duration_us
        bucket = duration_us.bit_length() - 1
        self.histogram[0 if bucket < 0 else min(bucket, BUCKET_COUNT - 1)] += 1

    def status(self) -> admin_pb2.CallStatus:
        """As a status tells it; the end of the histogram without calls is left out."""
        used = max((number for number, calls in enumerate(self.histogram) if calls), default=-1)
        return admin_pb2.CallStatus(
            method=self.method,
            calls=self.calls,
            failures=self.failures,
            total_us=self.total_us,
            histogram_us=self.histogram[: used + 1],
        )


class TimedCall:
    """`with` this a call is answered; however it ends, it is counted then."""

    __slots__ = ("_began_ns", "_count", "_is_stream", "_now_ns")

    def __init__(self, count: MethodCount, now_ns: NowNs, *, is_stream: bool) -> None:
        """The call begins now."""
        self._count = count
        self._now_ns = now_ns
        self._is_stream = is_stream
        self._began_ns = now_ns()

    def __enter__(self) -> None:
        """It has begun already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Count it."""
        given_up = kind is not None and issubclass(kind, asyncio.CancelledError)
        has_failed = kind is not None and not (given_up and self._is_stream)
        self._count.add(self._now_ns() - self._began_ns, has_failed=has_failed)


class CallCounts:
    """The counts of all methods of a server."""

    def __init__(self, now_ns: NowNs = time.perf_counter_ns) -> None:
        """Nothing was called yet."""
        self.now_ns = now_ns
        self._counts: dict[str, MethodCount] = {}

    def of(self, method: str) -> MethodCount:
        """The count of the method with this name."""
        return self._counts.setdefault(method, MethodCount(method))

    def of_request(self, request_type: type[Message]) -> MethodCount:
        """The count of the method that takes such requests."""
        return self.of(method_of(request_type))

    def of_operations(self, kinds: Mapping[str, Any]) -> Mapping[str, MethodCount]:
        """The counts of the operations of sessions, by their kinds."""
        return MappingProxyType({kind: self.of(f"Session.{kind}") for kind in kinds})

    def statuses(self) -> Iterator[admin_pb2.CallStatus]:
        """The methods that were called, by name."""
        for _, count in sorted(self._counts.items()):
            if count.calls:
                yield count.status()


def method_of(request_type: type[Message]) -> str:
    """Such as ``KV.Get``: the method of our services that takes requests of this type."""
    wanted = request_type.DESCRIPTOR
    for service in wanted.file.services_by_name.values():
        for method in service.methods:
            if method.input_type is wanted:
                return f"{service.name}.{method.name}"
    raise KeyError(f"no method takes a {wanted.full_name}")
