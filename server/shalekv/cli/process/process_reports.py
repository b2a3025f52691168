r"""Reports of the compactor and the collector to the server that has started them.

They are lines on the standard output of a child:

    {"sent":{"write":12, ...},"metrics":[["compactions",["wal"],7], ...]}\n

`sent` are the requests to the object store, `metrics` the samples of `Metrics`. Counters count from
the start of the child. A child writes a line every `REPORT_INTERVAL_MS`, and at its end. If the
parent does not read, lines are left out but no counts: the next line includes them. A line that the
pipe takes a part of is completed before the next one.

The server adds them up over the restarts of a child. What a child that has ended has counted stays;
its gauges vanish.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, ConfigDict, Field

from shalekv.clock import Clock
from shalekv.server.status import ProcessUse
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.telemetry.metrics import Metrics, metrics_of
from shalekv.telemetry.process_use import add_process_use

REPORT_INTERVAL_MS = 2_000
LINE_BYTES_MAX = 256 << 10  # a report of every operation in every folder takes a tenth of it
REQUESTS_MAX = 2**53  # so that sums stay within 64 bits

_STANDARD_OUTPUT = 1

_log = structlog.get_logger(__name__)

Sent = Mapping[RequestKind, int]
Fill = Callable[[Metrics], None]


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    sent: dict[str, Annotated[int, Field(ge=0, le=REQUESTS_MAX)]]
    metrics: list[Any] = Field(default_factory=list)


def report_line(sent: Sent, metrics: Metrics) -> bytes:
    """Encode a report as a line."""
    counts = {kind.value: requests for kind, requests in sent.items()}
    return _Report(sent=counts, metrics=metrics.rows()).model_dump_json().encode() + b"\n"


def parse_report(line: bytes) -> tuple[Sent, Metrics]:
    """Decode a line of a report; what is unknown to this version is left out.

    Raises ValueError when the line is no report.
    """
    report = _Report.model_validate_json(line)
    sent = {kind: report.sent[kind] for kind in RequestKind if kind in report.sent}
    return sent, metrics_of(report.metrics)


def total_of(counts: Sequence[RequestCounts]) -> dict[RequestKind, int]:
    """Add up the requests of several stores of one process."""
    return {kind: sum(each.by_kind[kind] for each in counts) for kind in RequestKind}


@contextmanager
def reporting_to_parent(role: str, counts: Sequence[RequestCounts], fill: Fill) -> Iterator[None]:
    """Report to the parent while entered, if standard output is a pipe.

    The report has the sum of `counts`, the samples that `fill` adds, and what this process uses.
    """
    if not _is_pipe():
        yield
        return
    # A parent that does not read must not block its child.
    os.set_blocking(_STANDARD_OUTPUT, False)
    loop, output = asyncio.get_running_loop(), _Output()
    timer: asyncio.TimerHandle | None = None

    def report() -> None:
        if output.is_free():
            metrics = Metrics()
            add_process_use(metrics, role)
            fill(metrics)
            output.write(report_line(total_of(counts), metrics))

    def report_periodically() -> None:
        nonlocal timer
        report()
        timer = loop.call_later(REPORT_INTERVAL_MS / 1_000, report_periodically)

    report_periodically()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        report()


def _is_pipe() -> bool:
    try:
        mode = os.fstat(_STANDARD_OUTPUT).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class _Output:
    """Standard output, which takes lines as far as the parent reads."""

    def __init__(self) -> None:
        self._rest = b""  # of the last line

    def is_free(self) -> bool:
        """Write what is left of the last line; returns whether that was all."""
        try:
            while self._rest:
                self._rest = self._rest[os.write(_STANDARD_OUTPUT, self._rest) :]
        except OSError:  # the pipe is full, or the parent is gone, which standard input reports
            return False
        return True

    def write(self, line: bytes) -> None:
        """Write a line, as far as the parent takes it. REQUIRES: `is_free`."""
        self._rest = line
        self.is_free()


class _Role:
    """The successive children of one role."""

    def __init__(self, began_ms: float) -> None:
        self.began_ms = began_ms
        self.is_running: bool | None = None  # None: none is wanted
        self.starts = self.crashes = 0
        self.is_bad_line_logged = False
        self._ended = dict.fromkeys(RequestKind, 0)
        self._ended_metrics = Metrics()
        self._current: Sent = {}
        self._current_metrics = Metrics()

    @property
    def sent(self) -> Sent:
        """The requests of all of them."""
        return {kind: count + self._current.get(kind, 0) for kind, count in self._ended.items()}

    def update(self, sent: Sent, metrics: Metrics) -> None:
        """Take a report of the child that runs."""
        self._current = {**self._current, **sent}
        self._current_metrics = metrics

    def end_child(self) -> None:
        """Keep what the child has counted: the next one counts from 0."""
        self._ended = dict(self.sent)
        self._ended_metrics.merge(self._current_metrics.cumulative())
        self._current, self._current_metrics = {}, Metrics()

    def fill(self, metrics: Metrics, name: str) -> None:
        """Add the samples of all of them."""
        metrics.merge(self._ended_metrics)
        metrics.merge(self._current_metrics)
        metrics.add("child_starts", self.starts, name)
        metrics.add("child_crashes", self.crashes, name)
        if self.is_running is not None:
            metrics.add("child_running", int(self.is_running), name)


class ChildReports:
    """Reports of the children of one server, added up over their restarts."""

    def __init__(self, clock: Clock) -> None:
        """Begin without children."""
        self._clock = clock
        self._roles: dict[str, _Role] = {}

    def processes(self) -> Iterator[ProcessUse]:
        """The requests of each role, as far as reported."""
        for name, role in self._roles.items():
            yield ProcessUse(name, role.began_ms, role.sent)

    def fill(self, metrics: Metrics) -> None:
        """Add the samples of all children, as far as reported."""
        for name, role in self._roles.items():
            role.fill(metrics, name)

    @contextmanager
    def wanting(self, name: str) -> Iterator[None]:
        """Report whether a child of this role runs, while entered."""
        role = self._role(name)
        role.is_running = False
        try:
            yield
        finally:
            role.is_running = None

    def started(self, name: str) -> None:
        """Note that a child runs."""
        role = self._role(name)
        role.is_running = True
        role.starts += 1

    def ended(self, name: str) -> None:
        """Note that no child runs."""
        self._role(name).is_running = False

    def crashed(self, name: str) -> None:
        """Note that a child has ended by an error, or could not be started."""
        self._role(name).crashes += 1

    async def read(self, name: str, stdout: asyncio.StreamReader) -> None:
        """Read the reports of a new child of the role `name`, to its end."""
        role = self._role(name)
        try:
            while True:
                try:
                    line = await stdout.readline()
                    if not line.endswith(b"\n"):
                        return  # the end; a partial line is dropped
                    role.update(*parse_report(line))
                except ValueError:  # no report, or too long a line, which readline has dropped
                    if not role.is_bad_line_logged:
                        role.is_bad_line_logged = True
                        _log.warning("child process writes what is no report", child=name)
        finally:
            role.end_child()

    def _role(self, name: str) -> _Role:
        role = self._roles.get(name)
        if role is None:
            role = self._roles[name] = _Role(self._clock.monotonic_ms())
        return role
