"""Counts of the calls of one process to a store, by operation and folder.

`RequestCounts` in `shalekv.store.api` counts what these calls send, by classes of price.
A call is also recorded in the activity of the task that makes it (`shalekv.telemetry.activity`).
All that costs some microseconds for a call, so every store that is opened counts.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import MappingProxyType

from shalekv.errors import (
    ObjectNotFound,
    StoreBroken,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from shalekv.format.names import LEVELS_FOLDER, MANIFEST_FOLDER, WAL_FOLDER
from shalekv.store.api import CreateOutcome, Unknown
from shalekv.telemetry.activity import CURRENT, StoreRequest
from shalekv.telemetry.histogram import Histogram
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.slow_requests import SlowRequests


class Operation(enum.StrEnum):
    """The methods of a store."""

    CREATE = "create"
    GET = "get"
    GET_RANGE = "get_range"
    HEAD = "head"
    LIST = "list"
    DELETE = "delete"
    NOW_MS = "now_ms"
    REPAIR = "recover"  # its name in the replies of `Admin.Status`


@dataclass(slots=True)
class Count:
    """Totals of one operation in one folder."""

    requests: int = 0  # attempts begun; a list counts once, however many pages it has
    failures: int = 0  # attempts that ended without an answer: unavailable, broken, unknown
    refusals: int = 0  # attempts that the store has refused, for example with a 403
    given_up: int = 0  # attempts that were cancelled
    running: int = 0  # attempts that have not ended
    objects: int = 0  # objects created, read, listed, or requested to be deleted
    transferred_bytes: int = 0  # contents sent by creates and received by reads
    # Microseconds of attempts that have ended, failed ones too, without reads that did not wait.
    durations: Histogram = field(default_factory=Histogram, repr=False, compare=False)

    def outcomes(self) -> Iterator[tuple[str, int]]:
        """Yield how many attempts have ended, by how; each number only grows."""
        others = {"failed": self.failures, "refused": self.refusals, "given_up": self.given_up}
        yield "ok", self.requests - self.running - sum(others.values())
        yield from others.items()

    def received(self, data: bytes) -> None:
        """Count an object, of which `data` was read."""
        self.objects += 1
        self.transferred_bytes += len(data)


class CountedRequest:
    """One call of a store. Each of its attempts is made in a ``with`` block of it."""

    __slots__ = ("_earlier_ns", "_folder", "_slow", "count", "record")

    def __init__(
        self, count: Count, slow: SlowRequests, operation: Operation, name: str, folder: str
    ) -> None:
        """Record the call in the activity of the running task, if there is one."""
        activity, now_ns = CURRENT.get(), slow.now_ns()
        if activity is None:
            self.record = StoreRequest(operation, name, now_ns)
        else:
            self.record = activity.begin_request(operation, name, now_ns)
        self.count = count
        self._slow = slow
        self._folder = folder
        self._earlier_ns = 0  # time of the attempt before it was suspended

    def sends(self, data: bytes) -> None:
        """Count the contents that an attempt to create an object sends."""
        self.count.transferred_bytes += len(data)
        self.record.size_bytes = len(data)

    def answered(self, outcome: CreateOutcome) -> None:
        """Count the outcome of a create."""
        if isinstance(outcome, Unknown):
            self.count.failures += 1
            self.record.problem = outcome.cause
        else:
            self.count.objects += 1

    def received(self, data: bytes) -> None:
        """Count an object, of which `data` was read."""
        self.count.received(data)
        self.record.size_bytes += len(data)

    def __enter__(self) -> None:
        """Count an attempt, and begin to measure it."""
        record = self.record
        self.count.requests += 1
        self.count.running += 1
        if record.ended_ns:
            record.attempts += 1
            record.ended_ns = 0
        self._earlier_ns = 0
        self._slow.begin(record, self._folder)

    def suspend(self) -> None:
        """Stop the clock, while the attempt waits for its caller."""
        self._earlier_ns += self._slow.suspend(self.record)

    def resume(self) -> None:
        """Let the clock go on after `suspend`."""
        self._slow.begin(self.record, self._folder)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Count how long it took, and how it ended, if not well."""
        count = self.count
        count.running -= 1
        if error is not None:
            count.failures += isinstance(error, StoreUnavailable | StoreBroken)
            count.refusals += isinstance(error, StoreRefused)
            count.given_up += isinstance(error, asyncio.CancelledError)
        if isinstance(error, StoreError):
            if not isinstance(error, ObjectNotFound):  # which is an answer
                self.record.problem = error.problem
        elif error is not None:
            self.record.problem = "given up"
        duration_ns = self._slow.end(self.record, self._folder, self._earlier_ns)
        self.count.durations.add(duration_ns // 1_000)


FOLDERS = tuple(name.rstrip("/") for name in (MANIFEST_FOLDER, WAL_FOLDER, LEVELS_FOLDER))


class StoreCallCounts:
    """Counts of calls to one store; the numbers only grow."""

    def __init__(self, slow_ms: int = 0, *, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        """Attempts of more than `slow_ms` are slow; 0: none is."""
        self.slow = SlowRequests(slow_ms, now_ns=now_ns)
        self._counts: dict[tuple[Operation, str], Count] = {}

    @property
    def by_folder(self) -> Mapping[tuple[Operation, str], Count]:
        """A live view of the counts by operation and folder.

        The folder is one of `FOLDERS`, or "" for names elsewhere, and for names of several folders.
        """
        return MappingProxyType(self._counts)

    def add_to(self, metrics: Metrics, process: str) -> None:
        """Add the samples of these calls, which a process with this role has made."""
        for (operation, folder), count in self._counts.items():
            labels = (process, operation.value, folder)
            for outcome, attempts in count.outcomes():
                metrics.add("store_requests", attempts, *labels, outcome)
            metrics.add("store_bytes", count.transferred_bytes, *labels)
            metrics.add_histogram("store_request_duration_seconds", count.durations, *labels)
        self.slow.add_to(metrics, process)

    def of(self, operation: Operation, name: str = "") -> Count:
        """Return the count for calls of `operation` with `name`, an object or a folder."""
        return self._of(operation, _folder(name))

    def begin(self, operation: Operation, name: str = "") -> CountedRequest:
        """Begin a call of `operation` with `name`, an object or a folder."""
        folder = name.partition("/")[0]
        count = self._counts.get((operation, folder))
        if count is None:  # the first one, or elsewhere
            folder = _folder(name)
            count = self._of(operation, folder)
        return CountedRequest(count, self.slow, operation, name, folder)

    def begin_many(self, operation: Operation, names: tuple[str, ...]) -> CountedRequest:
        """Begin a call of `operation` with these names at once."""
        if len(names) == 1:
            return self.begin(operation, names[0])
        folders = {name.partition("/")[0] for name in names}
        return self.begin(operation, f"{folders.pop()}/" if len(folders) == 1 else "")

    def _of(self, operation: Operation, folder: str) -> Count:
        count = self._counts.get((operation, folder))
        if count is None:
            count = self._counts[operation, folder] = Count()
        return count


def _folder(name: str) -> str:
    folder = name.partition("/")[0]
    return folder if folder in FOLDERS else ""
