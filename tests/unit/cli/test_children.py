"""Child processes of a server: kept running, told to hurry, ended with it. Real processes."""

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
from shalekv.cli.process.supervisor import COMPACTOR, ChildCommand, ChildSupervisor, child_commands
from shalekv.clock import Clock, LoopClock
from shalekv.errors import Fenced
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import (
    CasChoice,
    ChildrenSettings,
    CollectSettings,
    CompactorSettings,
    CompactSettings,
    DatabaseSettings,
    LevelCodec,
    LevelSettings,
    ServerSettings,
    ServeSettings,
    StoreSettings,
)

QUICK = ChildrenSettings(child_restart_initial_ms=1, child_restart_max_ms=4, child_grace_ms=50)
FOR_EVER = ChildrenSettings(child_grace_ms=600_000)

# Each appends what happens to it to the file that it is given.
TELL = """
import os, signal, sys, time
def tell(*words):
    with open(sys.argv[1], "w") as file:
        print(*words, file=file, flush=True)
"""
OBEDIENT = (
    TELL + "tell('began', os.getpid())\nfor line in sys.stdin: tell(line.strip())\ntell('end')"
)
ENDS = TELL + "tell('began', os.getpid())\nsys.exit({code})"
TELLS_SETTINGS = (
    TELL
    + """
tell(*(f'{name}={value}' for name, value in os.environ.items() if name.startswith('SHALEKV_')))
sys.stdin.read()
"""
)
STUBBORN = (
    TELL
    + """
signal.signal(signal.SIGTERM, lambda *_: tell('SIGTERM'))
while os.getpriority(os.PRIO_PROCESS, 0) < 10: time.sleep(0.001)
tell('began', os.getpid(), os.getpriority(os.PRIO_PROCESS, 0))
while True:
    time.sleep(1000)
"""
)

SECRET = "mysql://me:pass-word@there/database"


class ShortLives(LoopClock):
    """A clock by which each child ends at the moment at which it began."""

    def monotonic_ms(self) -> float:
        return 0.0


class Told:
    """What children tell, through a named pipe, and what is logged about them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self.lines: list[str] = []
        self.events: list[str] = []
        self.restarts_ms: list[int] = []
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
async def told(tmp_path: Path) -> AsyncIterator[Told]:
    """One of this test."""
    told = Told(tmp_path / "told")
    structlog.configure(processors=[told.on_log])
    yield told
    structlog.reset_defaults()
    told.close()


async def beside(
    serving: Awaitable[None],
    told: Told,
    program: str,
    settings: ChildrenSettings = QUICK,
    *,
    is_pressed: bool = False,
    clock: Clock | None = None,
    secrets: Mapping[str, str] | None = None,
) -> None:
    async def serve() -> None:
        await serving

    command = ChildCommand(COMPACTOR, ["-c", program, str(told.path)], secrets or {})
    runtime = Runtime(clock or LoopClock(), Random(0), ThreadWorkers(1))
    children = ChildSupervisor([command], settings, runtime, is_pressed=lambda: is_pressed)
    await children.run_beside(serve())


@pytest.mark.parametrize("code", [0, 1, 6])
async def test_a_child_that_ends_is_started_again(told: Told, code: int) -> None:
    """Whatever its exit code says, but those of the next test."""
    await beside(told.until(lambda lines: len(lines) >= 4), told, ENDS.format(code=code))
    assert len({line.split()[1] for line in told.lines}) >= 4  # process ids


async def test_delays_double_up_to_the_longest(told: Told) -> None:
    """And are drawn from the upper half, so that many servers don't come back at once."""
    settings = ChildrenSettings(child_restart_initial_ms=4, child_restart_max_ms=30)
    serving = told.until_logged("child process has ended", 6)
    await beside(serving, told, "raise SystemExit(1)", settings, clock=ShortLives())
    longest = [4, 8, 16, 30, 30, 30]
    assert all(
        most / 2 - 1 <= drawn <= most
        for drawn, most in zip(told.restarts_ms[:6], longest, strict=True)
    ), told.restarts_ms


@pytest.mark.parametrize("code", [2, 4])
async def test_a_child_that_was_superseded_or_is_misled_stays_down(told: Told, code: int) -> None:
    """Another compactor is not fought, and what is wrong with the settings is told once."""
    serving = told.until_logged("child process stays down")
    await beside(serving, told, ENDS.format(code=code))
    assert told.events == ["child process started", "child process stays down"]


async def test_a_child_that_does_not_end_is_ended(told: Told) -> None:
    """SIGTERM after the grace, SIGKILL after another; and it was niced."""
    # As it is niced, it may have to wait for its turn to tell of the signal.
    settings = QUICK.model_copy(update={"child_grace_ms": 2_000})
    await beside(told.until(bool), told, STUBBORN, settings)
    await told.until(lambda lines: len(lines) == 2)
    began, terminated = told.lines
    assert terminated == "SIGTERM"
    _, pid, niceness = began.split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert int(niceness) >= 10


async def test_a_compactor_is_told_to_hurry(told: Told) -> None:
    """Once what is not compacted is about to hold writes back."""
    enough = told.until(lambda lines: lines[1:3] == ["hurry", "hurry"])
    await beside(enough, told, OBEDIENT, FOR_EVER, is_pressed=True)


SETTINGS = ServeSettings(
    database=DatabaseSettings(url="file:///there", create=True),
    server=ServerSettings.model_validate({"listen": "127.0.0.1:1", "log_format": "json"}),
    levels=LevelSettings(codec=LevelCodec.ZSTD, sst_bytes=1 << 20),
    compactor=CompactorSettings(wal_trigger_bytes=1 << 20),
)


def test_children_are_told_the_settings_of_their_server() -> None:
    """Read back from the flags, they are the same; nothing else of the server is passed on."""
    commands = {command.role: list(command.argv) for command in child_commands(SETTINGS)}
    assert list(commands) == ["compactor", "collector"]

    def read_back(role: str, model: type[CompactSettings | CollectSettings]) -> object:
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

    assert read_back("compactor", CompactSettings) == CompactSettings.model_validate(
        {
            "server": {"log_format": "json"},
            "levels": SETTINGS.levels,
            "compactor": SETTINGS.compactor,
        }
    )
    assert read_back("collector", CollectSettings) == CollectSettings.model_validate(
        {"server": {"log_format": "json"}}
    )


def test_no_secret_is_an_argument() -> None:
    """Everybody can read arguments: what may hold a password goes by the environment."""
    store = StoreSettings(cas=CasChoice.TWO_PHASE, records_url=SECRET)
    for command in child_commands(SETTINGS.model_copy(update={"store": store})):
        assert "two_phase" in command.argv
        assert not any("pass-word" in argument for argument in command.argv)
        assert command.secrets == {"SHALEKV_STORE__RECORDS_URL": SECRET}
        assert "pass-word" not in repr(command)


async def test_a_child_gets_its_secrets_and_no_other_setting(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By variables of its own environment; those of its server do not reach it."""
    monkeypatch.setenv("SHALEKV_STORE__RECORDS_URL", "sqlite:///of-the-server")
    monkeypatch.setenv("SHALEKV_STORE__THREADS", "3")
    secrets = {"SHALEKV_STORE__RECORDS_URL": SECRET}
    await beside(told.until(bool), told, TELLS_SETTINGS, secrets=secrets)
    assert told.lines[0] == f"SHALEKV_STORE__RECORDS_URL={SECRET}"


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
    """None for memory://, which no other process can read."""
    settings = SETTINGS.model_copy(
        update={"database": DatabaseSettings(url=url), "children": ChildrenSettings(**switches)}
    )
    assert [command.role for command in child_commands(settings)] == roles


async def test_a_compactor_that_is_missed_is_started_again(told: Told) -> None:
    """The one that took over may have died: held-back writes tell that nobody compacts."""
    settings = QUICK.model_copy(update={"child_takeover_ms": 100})
    serving = told.until(lambda lines: len(lines) >= 3)
    await beside(serving, told, ENDS.format(code=4), settings, is_pressed=True)
    assert "child process is started again: nobody else does its work" in told.events


async def test_what_ended_serving_is_raised_as_itself(told: Told) -> None:
    """No group hides the error that decides about the exit code."""

    async def fail() -> None:
        await told.until(bool)
        raise Fenced("another writer", own_epoch=1, newer_epoch=2)

    with pytest.raises(Fenced):
        await beside(fail(), told, OBEDIENT, FOR_EVER)
    await told.until(lambda lines: lines[-1] == "end")


async def test_a_child_that_cannot_start_is_no_end_of_serving(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on, and tries again."""
    monkeypatch.setattr(sys, "executable", "/there/is/no/such/python")
    await beside(told.until_logged("child process cannot start", 2), told, OBEDIENT)
