r"""Supervisor of the child processes of `shalekv serve`: its compactor and its collector.

    starting ---> running ---- ended ----> waiting, longer each time ---> starting
       |             |    \--- ended with a code of STAY_DOWN ---> down (after FENCED: until data
       |             |                        that is not compacted is pressing for TAKEOVER_MS)
       +-------------+--- stop requested: end of its pipe, then SIGTERM, then SIGKILL

Child processes take no time from the event loop that serves, and run at a lower priority. They end
at the end of their standard input (see `cli.process.shutdown`), so none outlives this process,
however it ends. `cli.process.process_reports` says what they report on standard output.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import structlog

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.settings_flags import ENVIRONMENT_PREFIX, settings_of
from shalekv.cli.process.process_reports import LINE_BYTES_MAX, ChildReports
from shalekv.cli.process.shutdown import HURRY
from shalekv.runtime import Runtime
from shalekv.settings import (
    CollectorConfig,
    CompactorConfig,
    Settings,
    WriterConfig,
)

COMPACTOR = "compactor"
NICENESS = 10  # below whatever serves, above idle work
LAST_REPORT_MS = 1_000
# The first delay before a child that has ended is started again: an accident costs little. The
# delay doubles with each end until the child has run for as long as the longest delay, which spares
# a store that refuses every start.
RESTART_INITIAL_MS = 500
RESTART_MAX_MS = 60_000
# When data that is not compacted has pressed for so long, no other compactor works: one that does
# ends the pressure within a few seconds.
TAKEOVER_MS = 30_000
GRACE_MS = 5_000  # until SIGTERM, and again until SIGKILL: a child has to end requests in flight
PRESSURE_POLL_MS = 50  # a memtable of some MiB is filled in a second
STARTED_BY_ITSELF = ("-m", "shalekv.cli.main")
# Exit codes after which a restart does not help: another compactor has taken over, and restarting
# this one would fence it; or a setting is wrong.
STAY_DOWN: Mapping[int, str] = {
    ExitCode.FENCED: "another compactor has taken over, and restarting this one would fence it: "
    "give --no-with-compactor to this server if another compactor is intended. It is started again "
    "when data that is not compacted has threatened for 30 seconds to hold writes back",
    ExitCode.USAGE: "its settings are wrong, and would be wrong again",
}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """The command that starts a child process of one role.

    `argv` are the arguments of the interpreter. `secrets` are environment variables, because all
    users of the machine can read the arguments of a process.
    """

    role: str
    argv: Sequence[str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def child_commands(settings: WriterConfig) -> list[ChildCommand]:
    """The commands of the children that `settings` ask for.

    Each gets its settings as flags, and secrets in its environment.
    """
    children = settings.children
    if not children.with_compactor and not children.with_collector:
        return []
    if settings.database.url.startswith("memory://"):
        _log.info("no compactor and no collector: no other process can read memory://")
        return []
    models: Mapping[str, tuple[bool, type[Settings]]] = {
        COMPACTOR: (children.with_compactor, CompactorConfig),
        "collector": (children.with_collector, CollectorConfig),
    }
    return [
        _command(role, settings, model) for role, (is_wanted, model) in models.items() if is_wanted
    ]


def _command(role: str, settings: WriterConfig, model: type[Settings]) -> ChildCommand:
    flags = ["--parent-pipe", "--url", settings.database.url]
    secrets = {}
    for setting in settings_of(model):
        value = getattr(getattr(settings, setting.group), setting.name)
        if setting.group in {"database", "tls"} or value == setting.field.default:
            continue
        if setting.name in {"metrics", "insecure"}:  # it reports to us, and has no port
            continue
        if setting.is_secret:
            secrets[setting.variable] = str(value)
        elif setting.is_switch:
            flags.append(setting.flag if value else "--no-" + setting.flag.removeprefix("--"))
        else:
            flags += [setting.flag, str(value)]
    return ChildCommand(role, [*STARTED_BY_ITSELF, role, *flags], secrets)


class RestartDelay:
    """Delay before a process that has ended is started again, with jitter."""

    def __init__(self, random: Random) -> None:
        """Begin with the shortest one."""
        self._random = random
        self._delay_ms = float(RESTART_INITIAL_MS)

    def next_ms(self, ran_ms: float) -> float:
        """Return the delay after a process that has run for `ran_ms`."""
        if ran_ms >= RESTART_MAX_MS:
            self._delay_ms = RESTART_INITIAL_MS
        delay_ms, self._delay_ms = self._delay_ms, min(2 * self._delay_ms, RESTART_MAX_MS)
        return self._random.uniform(delay_ms / 2, delay_ms)


class ChildSupervisor:
    """Keeps the child processes of one server running."""

    def __init__(
        self,
        commands: Sequence[ChildCommand],
        runtime: Runtime,
        *,
        reports: ChildReports,
        is_pressed: Callable[[], bool],
    ) -> None:
        """Create a supervisor; `run_beside` starts the children, which report to `reports`.

        `is_pressed` returns whether data that is not compacted is about to hold writes back.
        """
        self._commands = commands
        self._is_pressed = is_pressed
        self._clock = runtime.clock
        self._random = runtime.random
        self._processes: dict[str, Process] = {}
        self._reports = reports
        self._stopping = asyncio.Event()

    async def run_beside(self, serving: Coroutine[Any, Any, None]) -> None:
        """Run the children while `serving` runs, then end them. Raises the error of `serving`."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            for command in self._commands:
                tasks.create_task(self._supervise(command), name=command.role)
            if any(command.role == COMPACTOR for command in self._commands):
                tasks.create_task(self._hurry_when_pressed(), name="hurry")
            try:
                await serving
            except Exception as error:  # noqa: BLE001 - raised below, after the children have ended
                failure = error
            finally:
                self._stopping.set()
        if failure is not None:
            raise failure

    def hurry(self) -> None:
        """Ask the compactor to compact at once what is about to hold writes back."""
        process = self._processes.get(COMPACTOR)
        pipe = process.stdin if process is not None else None
        # If the compactor does not read, an earlier line is still waiting for it.
        if (
            pipe is not None
            and not pipe.is_closing()
            and not pipe.transport.get_write_buffer_size()
        ):
            pipe.write(HURRY + b"\n")

    async def _hurry_when_pressed(self) -> None:
        while not self._stopping.is_set():
            if self._is_pressed():
                self.hurry()
            await self._wait_ms(PRESSURE_POLL_MS)

    async def _supervise(self, command: ChildCommand) -> None:
        with self._reports.wanting(command.role):
            await self._keep_running(command)

    async def _keep_running(self, command: ChildCommand) -> None:
        restarts = RestartDelay(self._random)
        while not self._stopping.is_set():
            began_ms = self._clock.monotonic_ms()
            code = await self._run(command)
            log = _log.bind(child=command.role, exit_code=code)
            if self._stopping.is_set():
                return
            if code != ExitCode.OK:
                self._reports.crashed(command.role)
            if code is not None and code in STAY_DOWN:
                log.error("child process stays down", problem=STAY_DOWN[code])
                if code != ExitCode.FENCED or not await self._is_takeover_due():
                    return
                log.warning("child process is started again: no other process does its work")
                continue
            delay_ms = restarts.next_ms(self._clock.monotonic_ms() - began_ms)
            log.warning("child process has ended", restart_ms=round(delay_ms))
            await self._wait_ms(delay_ms)

    async def _is_takeover_due(self) -> bool:
        """Wait until `is_pressed` for `TAKEOVER_MS`; False if a stop came before.

        The compactor that took over may have ended, for example with the fenced writer that
        started it.
        """
        pressed_ms = 0
        while not self._stopping.is_set():
            await self._wait_ms(PRESSURE_POLL_MS)
            pressed_ms = pressed_ms + PRESSURE_POLL_MS if self._is_pressed() else 0
            if pressed_ms >= TAKEOVER_MS:
                return True
        return False

    async def _run(self, command: ChildCommand) -> int | None:
        """Start a child and wait for its end. Returns the exit code; None if it did not start."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command.argv,
                stdin=PIPE,
                stdout=PIPE,  # for its reports; it inherits stderr for its log
                limit=LINE_BYTES_MAX,
                env=child_environment(os.environ) | dict(command.secrets),
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the child
            )
        except OSError as error:
            _log.error("child process cannot start", child=command.role, problem=str(error))
            return None
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        _log.info("child process started", child=command.role, pid=process.pid)
        self._processes[command.role] = process
        self._reports.started(command.role)
        try:
            return await self._wait(command.role, process)
        finally:
            self._reports.ended(command.role)
            del self._processes[command.role]

    async def _wait(self, role: str, process: Process) -> int:
        """Wait for the end of a child; end it when a stop is requested. Returns the exit code."""
        async with asyncio.TaskGroup() as tasks:
            assert process.stdout is not None
            reading = tasks.create_task(self._reports.read(role, process.stdout))
            ending = tasks.create_task(self._end(process))
            code = await process.wait()
            # The last report may still be in the pipe. Wait with a limit: a process that has
            # inherited the other end can keep it open.
            await asyncio.wait([reading], timeout=LAST_REPORT_MS / 1_000)
            reading.cancel()
            ending.cancel()
        return code

    async def _end(self, process: Process) -> None:
        await self._stopping.wait()
        if process.stdin is not None:
            process.stdin.close()
        for number, send in ((signal.SIGTERM, os.kill), (signal.SIGKILL, os.killpg)):
            await self._clock.sleep_ms(GRACE_MS)
            _log.warning("child process does not end", pid=process.pid, sent=number.name)
            with suppress(ProcessLookupError):
                send(process.pid, number)  # SIGKILL goes to the processes of the child as well

    async def _wait_ms(self, duration_ms: float) -> None:
        """Wait for a duration, or until a stop is requested."""
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_ms / 1000):
                await self._stopping.wait()


def child_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child, which has its settings from elsewhere: without any of them.

    They would contradict the others, and some are secrets that the child does not need.
    """
    return {k: v for k, v in inherited.items() if not k.upper().startswith(ENVIRONMENT_PREFIX)}
