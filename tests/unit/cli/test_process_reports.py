"""Reports of child processes about their requests: the lines, and the sums, with real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest
import structlog

from shalekv.cli.process.process_reports import (
    LINE_BYTES_MAX,
    REQUESTS_MAX,
    ChildReports,
    parse_report,
    report_line,
    total_of,
)
from shalekv.cli.process.supervisor import ChildCommand, ChildSupervisor
from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.store.counting import FOLDERS, Operation
from shalekv.telemetry.histogram import BUCKET_COUNT, Histogram
from shalekv.telemetry.metrics import Metrics, Sample
from tests.kit.constants import constants

SUPERVISOR = "shalekv.cli.process.supervisor"
QUICK = {f"{SUPERVISOR}:RESTART_INITIAL_MS": 1, f"{SUPERVISOR}:RESTART_MAX_MS": 4}

# Counts and reports requests, waits for the end of its input, and counts one more.
REPORTER = """
import asyncio, os, sys, uvloop
from shalekv.cli.process import process_reports
from shalekv.store.api import RequestCounts, RequestKind
process_reports.REPORT_INTERVAL_MS = 1

async def child():
    first, second = RequestCounts(), RequestCounts()
    def fill(metrics):
        metrics.add("compactions", first.total, "wal")

    with process_reports.reporting_to_parent("test", [first, second], fill):
        first.add(RequestKind.LIST)
        second.add(RequestKind.LIST, 2)
        await asyncio.to_thread(sys.stdin.read)
        first.add(RequestKind.DELETE)

(uvloop.run if sys.argv[1] == "uvloop" else asyncio.run)(child())
"""
# Ends, and leaves another process that writes a report only afterwards.
LATE = """
import os, sys, time
child = os.getpid()
if os.fork() == 0:
    while os.getppid() == child: time.sleep(0.001)
    time.sleep(0.2)  # so that the parent has noticed the end
    sys.stdout.write('{"sent":{"write":5}}\\n')
"""
# Reports, and ends.
BRIEF = """
print('{"sent":{"read":1},"metrics":[["compactions",["wal"],2],["process_resident_bytes",["x"],9]]}')
"""
CHATTY = """
import sys
print("a library has something to say")
print("x" * 100_000)
print('{"sent":{"read":1}}')
print("again")
print('{"sent":{"read":3}}', flush=True)
sys.stdin.read()
"""


def counts_of(reports: ChildReports, role: str = "test") -> Mapping[RequestKind, int]:
    """The reported requests of the children of this role; empty if none has begun."""
    return next((use.sent for use in reports.processes() if use.role == role), {})


def sample_of(reports: ChildReports, *name_and_labels: str) -> Sample | None:
    """One of the samples of all children."""
    metrics = Metrics()
    reports.fill(metrics)
    return metrics.get(*name_and_labels)


class _Lines(asyncio.StreamReader):
    """A reader that calls `on_line` for each line of another one, before it is handled."""

    def __init__(self, inner: asyncio.StreamReader, on_line: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._on_line = on_line

    async def readline(self) -> bytes:
        line = await self._inner.readline()
        # The waiting task runs after the caller, which handles the line without a wait.
        self._on_line()
        return line


class AwaitableReports(ChildReports):
    """Reports that a test can wait for."""

    def __init__(self) -> None:
        super().__init__(LoopClock())
        self._changed = asyncio.Event()

    async def read(self, name: str, stdout: asyncio.StreamReader) -> None:
        await super().read(name, _Lines(stdout, self._changed.set))

    async def until(self, is_enough: Callable[[ChildReports], bool]) -> None:
        while not is_enough(self):
            self._changed.clear()
            await self._changed.wait()


async def run_beside(
    program: str, *argv: str, until_: Callable[[ChildReports], bool]
) -> ChildReports:
    """Run `program` as a child until `until_` holds, and return the final reports."""
    runtime = Runtime(LoopClock(), Random(0), ThreadWorkers(1))
    command = ChildCommand("test", ["-c", program, *argv])
    reports = AwaitableReports()
    children = ChildSupervisor([command], runtime, reports=reports, is_pressed=lambda: False)
    with constants(QUICK):
        await children.run_beside(reports.until(until_))
    return reports


@pytest.fixture
async def warnings() -> AsyncIterator[list[str]]:
    """The children with a logged warning about bad lines."""
    found: list[str] = []

    def on_log(_logger: object, _method: str, event: Mapping[str, Any]) -> NoReturn:
        if "no report" in event["event"]:
            found.append(event["child"])
        raise structlog.DropEvent

    structlog.configure(processors=[on_log])
    yield found
    structlog.reset_defaults()


def test_lines_are_read_back() -> None:
    """A report with the largest counts of every kind is read back, and fits into a line."""
    most, metrics = dict.fromkeys(RequestKind, REQUESTS_MAX), Metrics()
    for operation in Operation:
        for folder in (*FOLDERS, ""):
            labels = ("compactor", operation.value, folder)
            for outcome in map(str, range(8)):
                metrics.add("store_requests", REQUESTS_MAX, *labels, outcome)
            durations = Histogram()
            durations.merge([REQUESTS_MAX] * BUCKET_COUNT, REQUESTS_MAX)
            metrics.add_histogram("store_request_duration_seconds", durations, *labels)
    line = report_line(most, metrics)
    sent, read_back = parse_report(line)
    assert sent == most
    assert read_back.encode() == metrics.encode()
    assert len(line) < LINE_BYTES_MAX / 2
    assert line.count(b"\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"hello\n",
        b"[]\n",
        b"{}\n",
        b'{"sent":[]}\n',
        b'{"sent":{"write":-1}}\n',
        b'{"sent":{"write":1.5}}\n',
        b'{"sent":{"write":"1"}}\n',
        b'{"sent":{"write":true}}\n',
        b'{"sent":{"write":%d}}\n' % (REQUESTS_MAX + 1),
        b'{"sent":{},"metrics":{}}\n',
        b'{"sent":{},"metrics":[["compactions",["wal"]]]}\n',
        b'{"sent":{},"metrics":[["compactions",[],1]]}\n',
        b'{"sent":{},"metrics":[["compactions",["wal"],[1,[1]]]]}\n',
        b'{"sent":{},"metrics":[["commit_group_commits",[],1]]}\n',
        b'{"sent":{},"metrics":[["commit_group_commits",[],[1,[%s1]]]]}\n' % (b"1," * BUCKET_COUNT),
        b"[" * 1_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_report_is_refused(line: bytes) -> None:
    """A line that is no report, or has counts out of range, raises ValueError."""
    with pytest.raises(ValueError, match=r"."):
        parse_report(line)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_process_reports_while_it_runs_and_at_its_end(loop: str) -> None:
    """A child reports while it runs, and its last report before the end is not lost."""
    reports = await run_beside(
        REPORTER, loop, until_=lambda r: counts_of(r).get(RequestKind.LIST, 0) == 3
    )
    assert counts_of(reports)[RequestKind.LIST] == 3
    assert counts_of(reports)[RequestKind.DELETE] == 1
    assert sample_of(reports, "compactions", "wal") == 2
    cpu_s = sample_of(reports, "process_cpu_seconds", "test")
    assert isinstance(cpu_s, float)
    assert cpu_s > 0
    assert sample_of(reports, "process_resident_bytes", "test") is None  # it has ended


async def test_counters_grow_over_restarts() -> None:
    """What a child has counted stays when it has ended; the next one is added."""
    reports = await run_beside(BRIEF, until_=lambda r: counts_of(r).get(RequestKind.READ, 0) >= 3)
    ends = counts_of(reports)[RequestKind.READ]
    assert sample_of(reports, "compactions", "wal") == 2 * ends
    assert sample_of(reports, "process_resident_bytes", "x") is None
    assert sample_of(reports, "child_starts", "test") in {ends, ends + 1}
    assert sample_of(reports, "child_crashes", "test") == 0
    assert sample_of(reports, "child_running", "test") is None  # the server has ended


def test_a_full_pipe_loses_no_counts() -> None:
    """What is counted while the parent does not read is reported later, in lines that are whole."""
    fills = REPORTER.replace(
        "        await asyncio.to_thread(sys.stdin.read)\n",
        "        for _ in range(200):\n"
        "            first.add(RequestKind.READ)\n"
        "            await asyncio.sleep(0.001)\n"
        "        print('counted', file=sys.stderr, flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n",
    ).replace('"wal")', '"wal" + "x" * 10_000)')  # no write of it to a pipe is atomic
    with subprocess.Popen(
        [sys.executable, "-c", fills, "uvloop"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"counted\n"
        lines = 1
        while parse_report(process.stdout.readline())[0][RequestKind.READ] < 200:
            lines += 1
        assert lines < 150  # the others were left out
        process.stdin.close()
        *_, last = process.stdout
        assert parse_report(last)[0][RequestKind.DELETE] == 1


async def read_late_report() -> None:
    """Check a late report; runs in its own process, with the loop of a server."""
    reports = await run_beside(LATE, until_=lambda r: counts_of(r).get(RequestKind.WRITE, 0) >= 5)
    assert counts_of(reports)[RequestKind.WRITE] >= 5


def test_a_report_in_the_pipe_at_the_end_is_read() -> None:
    """A line that arrives after the end of the process was noticed is still read."""
    script = f"import uvloop, {__name__} as here; uvloop.run(here.read_late_report())"
    subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True, timeout=120
    )


async def test_bad_lines_are_ignored_and_logged_once(warnings: list[str]) -> None:
    """Bad or overlong lines hide no reports, and are logged once."""
    reports = await run_beside(CHATTY, until_=lambda r: counts_of(r).get(RequestKind.READ, 0) == 3)
    assert warnings == ["test"]
    assert sum(counts_of(reports).values()) == 3


async def test_a_partial_line_is_ignored() -> None:
    """A partial last line, as of a killed child, is ignored."""
    stdout = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    stdout.feed_data(b'{"sent":{"read":1}}\n{"sent":{"read":12}}')
    stdout.feed_eof()
    reports = ChildReports(LoopClock())
    await reports.read("test", stdout)
    assert counts_of(reports)[RequestKind.READ] == 1


def test_a_parent_that_does_not_read_blocks_no_child() -> None:
    """A child whose pipe is full is not blocked, and ends when it is asked to."""
    fills = REPORTER.replace(
        "        await asyncio.to_thread(sys.stdin.read)\n",
        "        try:\n"
        "            while os.write(1, b'x' * 512): pass\n"
        "        except BlockingIOError: pass\n"
        "        for _ in range(100):\n"
        "            first.add(RequestKind.READ)\n"
        "            await asyncio.sleep(0.001)\n",
    )
    process = subprocess.Popen([sys.executable, "-c", fills, "uvloop"], stdout=subprocess.PIPE)
    with process:
        try:
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_without_a_parent_nothing_is_reported(tmp_path: Path) -> None:
    """Nothing is written to standard output if it is no pipe."""
    with (tmp_path / "stdout").open("wb") as stdout:
        run = subprocess.run(
            [sys.executable, "-c", REPORTER, "asyncio"],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
            timeout=120,
        )
    assert (run.returncode, run.stderr) == (0, b"")
    assert (tmp_path / "stdout").read_bytes() == b""


def test_several_stores_are_one_process() -> None:
    """The requests of several stores of a process are added up."""
    first, second = RequestCounts(), RequestCounts()
    first.add(RequestKind.LIST, 2)
    second.add(RequestKind.LIST)
    second.add(RequestKind.READ)
    assert total_of([first, second])[RequestKind.LIST] == 3
    assert total_of([first, second])[RequestKind.READ] == 1
    assert sum(total_of([]).values()) == 0
