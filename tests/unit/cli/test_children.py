"""Child processes of a server are restarted, hurried, and ended with it; with real processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import click
import pytest
import structlog

from shalekv.cli.console.configuration import load_settings
from shalekv.cli.console.settings_flags import settings_flags
from shalekv.cli.process.process_reports import ChildReports
from shalekv.cli.process.supervisor import COMPACTOR, ChildCommand, ChildSupervisor, child_commands
from shalekv.clock import Clock, LoopClock
from shalekv.errors import Fenced
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import (
    CasChoice,
    ChildrenSettings,
    CollectorConfig,
    CompactorConfig,
    CompactorSettings,
    DatabaseSettings,
    LevelCodec,
    LevelSettings,
    ServerSettings,
    StoreSettings,
    TelemetrySettings,
    TlsSettings,
    WriterConfig,
)
from shalekv.telemetry.metrics import Metrics
from tests.kit.constants import Constants, constants

SUPERVISOR = "shalekv.cli.process.supervisor"
QUICK = {f"{SUPERVISOR}:RESTART_INITIAL_MS": 1, f"{SUPERVISOR}:RESTART_MAX_MS": 4}
GRACE = f"{SUPERVISOR}:GRACE_MS"
LONG_GRACE = {GRACE: 600_000}

# Each appends what happens to it to the file that it is given.
RECORD = """
import os, signal, sys, time
def record(*words):
    with open(sys.argv[1], "w") as file:
        print(*words, file=file, flush=True)
"""
OBEDIENT = (
    RECORD
    + "record('began', os.getpid())\nfor line in sys.stdin: record(line.strip())\nrecord('end')"
)
ENDS = RECORD + "record('began', os.getpid())\nsys.exit({code})"
PRINTS_SETTINGS = (
    RECORD
    + """
record(*(f'{name}={value}' for name, value in os.environ.items() if name.startswith('SHALEKV_')))
sys.stdin.read()
"""
)
STUBBORN = (
    RECORD
    + """
signal.signal(signal.SIGTERM, lambda *_: record('SIGTERM'))
while os.getpriority(os.PRIO_PROCESS, 0) < 10: time.sleep(0.001)
record('began', os.getpid(), os.getpriority(os.PRIO_PROCESS, 0))
while True:
    time.sleep(1000)
"""
)

SECRET = "mysql://me:pass-word@there/database"


class ShortLives(LoopClock):
    """A clock by which each child ends at the time at which it began."""

    def monotonic_ms(self) -> float:
        return 0.0


class GraceOfProgress(LoopClock):
    """A clock by which the grace of a child is over when the child has written another line."""

    def __init__(self, output: ChildOutput) -> None:
        self._output = output
        self._graces = 0

    async def sleep_ms(self, _duration_ms: float) -> None:
        self._graces += 1
        await self._output.until(lambda lines: len(lines) >= self._graces)


class ChildOutput:
    """The lines that children write to a named pipe, and the log events about them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self.lines: list[str] = []
        self.events: list[str] = []
        self.restarts_ms: list[int] = []
        self.metrics = Metrics()
        self._begun = ""
        self._changed = asyncio.Event()
        # For writing as well: or it would be at its end while no child has it open.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    async def until(self, is_enough: Callable[[list[str]], bool]) -> None:
        await self._until(lambda: is_enough(self.lines))

    async def until_logged(self, event: str, count: int = 1) -> None:
        await self._until(lambda: self.events.count(event) >= count)

    def on_log(self, _logger: object, _method: str, event: Mapping[str, Any]) -> NoReturn:
        self.events.append(event["event"])
        if "restart_ms" in event:
            self.restarts_ms.append(event["restart_ms"])
        self._changed.set()
        raise structlog.DropEvent

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)

    async def _until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            self._changed.clear()
            await self._changed.wait()

    def _read(self) -> None:
        *lines, self._begun = (self._begun + os.read(self._pipe, 65_536).decode()).split("\n")
        self.lines += lines
        self._changed.set()


@pytest.fixture
async def output(tmp_path: Path) -> AsyncIterator[ChildOutput]:
    """The output of the children of one test."""
    output = ChildOutput(tmp_path / "output")
    structlog.configure(processors=[output.on_log])
    yield output
    structlog.reset_defaults()
    output.close()


async def run_beside(
    serving: Awaitable[None],
    output: ChildOutput,
    program: str,
    changed: Constants = QUICK,
    *,
    is_pressed: bool = False,
    clock: Clock | None = None,
    secrets: Mapping[str, str] | None = None,
) -> None:
    async def serve() -> None:
        await serving

    command = ChildCommand(COMPACTOR, ["-c", program, str(output.path)], secrets or {})
    runtime = Runtime(clock or LoopClock(), Random(0), ThreadWorkers(1))
    reports = ChildReports(LoopClock())
    children = ChildSupervisor([command], runtime, reports=reports, is_pressed=lambda: is_pressed)
    with constants({GRACE: 50} | dict(changed)):
        try:
            await children.run_beside(serve())
        finally:
            reports.fill(output.metrics)


@pytest.mark.parametrize("code", [0, 1, 6])
async def test_a_child_that_ends_is_started_again(output: ChildOutput, code: int) -> None:
    """A child is restarted after any exit code that is not in `STAY_DOWN`.

    Ends by an error are counted.
    """
    await run_beside(output.until(lambda lines: len(lines) >= 4), output, ENDS.format(code=code))
    ends = output.events.count("child process has ended")
    assert output.metrics.get("child_starts", COMPACTOR) in {ends, ends + 1}
    assert output.metrics.get("child_crashes", COMPACTOR) == (ends if code else 0)
    assert len({line.split()[1] for line in output.lines}) >= 4  # process ids


async def test_delays_double_up_to_the_longest(output: ChildOutput) -> None:
    """Delays are random, from the upper half, so that many servers do not restart at once."""
    changed = {f"{SUPERVISOR}:RESTART_INITIAL_MS": 4, f"{SUPERVISOR}:RESTART_MAX_MS": 30}
    serving = output.until_logged("child process has ended", 6)
    await run_beside(serving, output, "raise SystemExit(1)", changed, clock=ShortLives())
    longest = [4, 8, 16, 30, 30, 30]
    assert all(
        most / 2 - 1 <= drawn <= most
        for drawn, most in zip(output.restarts_ms[:6], longest, strict=True)
    ), output.restarts_ms


@pytest.mark.parametrize("code", [2, 4])
async def test_a_child_that_was_fenced_or_misconfigured_stays_down(
    output: ChildOutput, code: int
) -> None:
    """A child that was fenced or has wrong settings is not restarted, and that is logged once."""
    serving = output.until_logged("child process stays down")
    await run_beside(serving, output, ENDS.format(code=code))
    assert output.events == ["child process started", "child process stays down"]
    assert output.metrics.get("child_crashes", COMPACTOR) == 1


async def test_a_child_that_does_not_end_is_ended(output: ChildOutput) -> None:
    """A child gets SIGTERM after the grace, SIGKILL after another, and has a lower priority."""
    # As it is niced, it may have to wait for long before it can record the signal.
    await run_beside(output.until(bool), output, STUBBORN, clock=GraceOfProgress(output))
    began, terminated = output.lines
    assert terminated == "SIGTERM"
    _, pid, niceness = began.split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert int(niceness) >= 10
    assert output.metrics.get("child_crashes", COMPACTOR) == 0  # it was ended by us


async def test_a_compactor_is_hurried(output: ChildOutput) -> None:
    """The compactor gets `hurry` while data that is not compacted holds writes back."""
    enough = output.until(lambda lines: lines[1:3] == ["hurry", "hurry"])
    await run_beside(enough, output, OBEDIENT, LONG_GRACE, is_pressed=True)


SETTINGS = WriterConfig(
    database=DatabaseSettings(url="file:///there", create=True),
    server=ServerSettings.model_validate(
        {"listen": "127.0.0.1:1", "log_format": "json", "insecure": True}
    ),
    tls=TlsSettings(tls_cert="server.crt", tls_key="server.key"),
    telemetry=TelemetrySettings(metrics="127.0.0.1:2", slow_ms=7),
    levels=LevelSettings(codec=LevelCodec.ZSTD, sst_bytes=1 << 20),
    compactor=CompactorSettings(wal_trigger_bytes=1 << 20),
)


def test_children_get_the_settings_of_their_server() -> None:
    """The flags of a child give it the settings of its server, and nothing else."""
    commands = {command.role: list(command.argv) for command in child_commands(SETTINGS)}
    assert list(commands) == ["compactor", "collector"]

    def read_back(role: str, model: type[CompactorConfig | CollectorConfig]) -> object:
        given: dict[str, object] = {}

        @click.command
        @settings_flags(model)
        @click.option("--parent-pipe", is_flag=True)
        def command(**flags: object) -> None:
            given.update(flags)

        argv = commands[role][commands[role].index(role) + 1 :]
        at = argv.index("--url")  # a flag of both commands, and no setting
        assert argv[at + 1] == "file:///there"
        del argv[at : at + 2]
        command(argv, standalone_mode=False)
        assert given.pop("parent_pipe") is True
        return load_settings(given, None, model)

    assert read_back("compactor", CompactorConfig) == CompactorConfig.model_validate(
        {
            "server": {"log_format": "json"},
            "levels": SETTINGS.levels,
            "compactor": SETTINGS.compactor,
            "telemetry": {"slow_ms": 7},
        }
    )
    assert read_back("collector", CollectorConfig) == CollectorConfig.model_validate(
        {"server": {"log_format": "json"}, "telemetry": {"slow_ms": 7}}
    )


def test_no_secret_is_an_argument() -> None:
    """Secrets are passed in the environment, because all users can read arguments."""
    store = StoreSettings(cas=CasChoice.TWO_PHASE, records_url=SECRET)
    for command in child_commands(SETTINGS.model_copy(update={"store": store})):
        assert "two_phase" in command.argv
        assert not any("pass-word" in argument for argument in command.argv)
        assert command.secrets == {"SHALEKV_STORE__RECORDS_URL": SECRET}
        assert "pass-word" not in repr(command)


async def test_a_child_gets_its_secrets_and_no_other_setting(
    output: ChildOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child gets its secrets as variables, and no other setting of the server's environment."""
    monkeypatch.setenv("SHALEKV_STORE__RECORDS_URL", "sqlite:///of-the-server")
    monkeypatch.setenv("SHALEKV_STORE__THREADS", "3")
    secrets = {"SHALEKV_STORE__RECORDS_URL": SECRET}
    await run_beside(output.until(bool), output, PRINTS_SETTINGS, secrets=secrets)
    assert output.lines[0] == f"SHALEKV_STORE__RECORDS_URL={SECRET}"


@pytest.mark.parametrize(
    ("url", "switches", "roles"),
    [
        ("file:///x", {"with_compactor": False}, ["collector"]),
        ("file:///x", {"with_collector": False}, ["compactor"]),
        ("file:///x", {"with_collector": False, "with_compactor": False}, []),
        ("memory://x", {}, []),
    ],
)
def test_children_are_those_that_are_wanted(
    url: str, switches: dict[str, bool], roles: list[str]
) -> None:
    """The settings choose the children; memory:// has none, since no other process can read it."""
    settings = SETTINGS.model_copy(
        update={"database": DatabaseSettings(url=url), "children": ChildrenSettings(**switches)}
    )
    assert [command.role for command in child_commands(settings)] == roles


async def test_a_fenced_compactor_takes_over_again(output: ChildOutput) -> None:
    """A fenced compactor is restarted if writes stay held back: the other one may have ended."""
    changed = QUICK | {f"{SUPERVISOR}:TAKEOVER_MS": 100}
    serving = output.until(lambda lines: len(lines) >= 3)
    await run_beside(serving, output, ENDS.format(code=4), changed, is_pressed=True)
    assert "child process is started again: no other process does its work" in output.events


async def test_what_ended_serving_is_raised_as_itself(output: ChildOutput) -> None:
    """The error of serving is raised without a group, since it decides the exit code."""

    async def fail() -> None:
        await output.until(bool)
        raise Fenced("another writer", own_epoch=1, newer_epoch=2)

    with pytest.raises(Fenced):
        await run_beside(fail(), output, OBEDIENT, LONG_GRACE)
    await output.until(lambda lines: lines[-1] == "end")


async def test_a_child_that_cannot_start_is_no_end_of_serving(
    output: ChildOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server continues if a child cannot start, and retries."""
    monkeypatch.setattr(sys, "executable", "/there/is/no/such/python")
    await run_beside(output.until_logged("child process cannot start", 2), output, OBEDIENT)
