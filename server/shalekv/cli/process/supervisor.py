r"""The compactor and the collector of `shalekv serve`, as child processes.

    starting ---> running ---- ended ----> waiting, longer each time ---> starting
       |             |    \--- ended with a code of STAY_DOWN ---> down, until it is missed
       |             |
       +-------------+--- asked to stop: end of its pipe, then SIGTERM, then SIGKILL

What they compute takes nothing from the event loop that serves: they are other processes, and
niced. They end when their standard input does (see `cli.process.shutdown`), so none outlives
this process, however it ends. What they send to the object store they report on standard output.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, ConfigDict, Field

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.settings_flags import ENVIRONMENT_PREFIX, settings_of
from shalekv.cli.process.shutdown import HURRY
from shalekv.clock import Clock
from shalekv.runtime import Runtime
from shalekv.server.status import ProcessUse
from shalekv.settings import (
    ChildrenSettings,
    CollectSettings,
    CompactSettings,
    ServeSettings,
    Settings,
)
from shalekv.store.api import RequestCounts, RequestKind

# --- child_reports
# Standard output as the line to the parent process: what a child has sent to the object store.
#
#     {"sent":{"write":12,"list":3, ...}}\n      numbers since the child has begun, which only
# grow
#
# A line is told every `REPORT_INTERVAL_MS` in which something has changed, and at the end. A
# parent that does not read loses lines, never counts: the next line has them.


REPORT_INTERVAL_MS = 2_000
LINE_BYTES_MAX = 1_024  # well below what a pipe takes whole
REQUESTS_MAX = 2**53  # sums of them stay within 64 bits

_STANDARD_OUTPUT = 1

_log = structlog.get_logger(__name__)

Sent = Mapping[RequestKind, int]


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    sent: dict[str, Annotated[int, Field(ge=0, le=REQUESTS_MAX)]]


def report_line(sent: Sent) -> bytes:
    """The line that tells so."""
    told = _Report(sent={kind.value: requests for kind, requests in sent.items()})
    return told.model_dump_json().encode() + b"\n"


def parse_report(line: bytes) -> Sent:
    """What a line tells; kinds that this version does not know are left out.

    Raises ValueError when it is no such line.
    """
    sent = _Report.model_validate_json(line).sent
    return {kind: sent[kind] for kind in RequestKind if kind in sent}


def total_of(counts: Sequence[RequestCounts]) -> dict[RequestKind, int]:
    """What several stores of one process have sent together."""
    return {kind: sum(each.by_kind[kind] for each in counts) for kind in RequestKind}


@contextmanager
def telling_parent(counts: Sequence[RequestCounts]) -> Iterator[None]:
    """Tell what `counts` come to; nothing where standard output leads to no process."""
    if not _leads_to_a_process():
        yield
        return
    # A parent that does not read must not hold up its child.
    os.set_blocking(_STANDARD_OUTPUT, False)
    loop = asyncio.get_running_loop()
    last = dict.fromkeys(RequestKind, 0)
    timer: asyncio.TimerHandle | None = None

    def tell() -> None:
        nonlocal last
        now = total_of(counts)
        if now != last and _write(report_line(now)):
            last = now

    def tell_again_and_again() -> None:
        nonlocal timer
        tell()
        timer = loop.call_later(REPORT_INTERVAL_MS / 1_000, tell_again_and_again)

    tell_again_and_again()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        tell()


def _leads_to_a_process() -> bool:
    try:
        mode = os.fstat(_STANDARD_OUTPUT).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _write(line: bytes) -> bool:
    """Whether the whole line went out."""
    try:
        return os.write(_STANDARD_OUTPUT, line) == len(line)
    except OSError:  # the pipe is full, or the parent is gone, of which standard input tells
        return False


class _Role:
    """The children that had one role, one after the other."""

    def __init__(self, began_ms: float) -> None:
        """None of them has told anything."""
        self.began_ms = began_ms
        self.of_ended = dict.fromkeys(RequestKind, 0)
        self.of_current = dict.fromkeys(RequestKind, 0)
        self.is_bad_line_told = False

    @property
    def sent(self) -> Sent:
        """By all of them."""
        return {kind: self.of_ended[kind] + self.of_current[kind] for kind in RequestKind}

    def begin_another(self) -> None:
        """A child counts from 0: keep what those before it have sent."""
        self.of_ended = dict(self.sent)
        self.of_current = dict.fromkeys(RequestKind, 0)


class ChildReports:
    """What the children of one server have told, added up over their restarts."""

    def __init__(self, clock: Clock) -> None:
        """There are no children yet."""
        self._clock = clock
        self._roles: dict[str, _Role] = {}

    def processes(self) -> Iterator[ProcessUse]:
        """What each role has sent, as far as it has told."""
        for name, role in self._roles.items():
            yield ProcessUse(name, role.began_ms, role.sent)

    async def read(self, name: str, stdout: asyncio.StreamReader) -> None:
        """Read what a child that begins with this role tells, to its end."""
        role = self._roles.setdefault(name, _Role(self._clock.monotonic_ms()))
        role.begin_another()
        while True:
            try:
                line = await stdout.readline()
                if not line.endswith(b"\n"):
                    return  # the end; half a line tells nothing
                role.of_current.update(parse_report(line))
            except ValueError:  # readline has dropped a line that is too long
                if not role.is_bad_line_told:
                    role.is_bad_line_told = True
                    _log.warning("child process writes what is no report", child=name)


# --- supervisor


COMPACTOR = "compactor"
NICENESS = 10  # below whatever serves, above what has no hurry at all
LAST_REPORT_MS = 1_000
PRESSURE_POLL_MS = 50  # a memtable of some MiB is filled in a second
STARTED_BY_ITSELF = ("-m", "shalekv.cli.main")
# What starting again cannot mend: another compactor has taken over, and would be taken over from
# in turn; a setting that is wrong stays wrong.
STAY_DOWN: Mapping[int, str] = {
    ExitCode.FENCED: "another one has taken over, and would be taken over from in turn: give "
    "--no-with-compactor to this server if that is meant to be so. It is started again when "
    "nobody compacts for child_takeover_ms",
    ExitCode.USAGE: "its settings are wrong, and would be the next time",
}


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """What a child process is called, and what starts it.

    `argv` is what comes after the interpreter. `secrets` are environment variables, since
    everybody on the machine can read the arguments of a process.
    """

    role: str
    argv: Sequence[str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def child_commands(settings: ServeSettings) -> list[ChildCommand]:
    """Those that `settings` want beside the server; flags tell each its settings, but secrets."""
    wanted = settings.children
    if not wanted.with_compactor and not wanted.with_collector:
        return []
    if settings.database.url.startswith("memory://"):
        _log.info("no compactor and no collector: no other process can read memory://")
        return []
    models: Mapping[str, tuple[bool, type[Settings]]] = {
        COMPACTOR: (wanted.with_compactor, CompactSettings),
        "collector": (wanted.with_collector, CollectSettings),
    }
    return [
        _command(role, settings, model) for role, (is_wanted, model) in models.items() if is_wanted
    ]


def _command(role: str, settings: ServeSettings, model: type[Settings]) -> ChildCommand:
    flags = ["--parent-pipe", "--url", settings.database.url]
    secrets = {}
    for setting in settings_of(model):
        value = getattr(getattr(settings, setting.group), setting.name)
        if setting.group == "database" or value == setting.field.default:
            continue
        if setting.is_secret:
            secrets[setting.variable] = str(value)
        elif setting.is_switch:
            flags.append(setting.flag if value else "--no-" + setting.flag.removeprefix("--"))
        else:
            flags += [setting.flag, str(value)]
    return ChildCommand(role, [*STARTED_BY_ITSELF, role, *flags], secrets)


class Children:
    """Keeps the child processes of one server running."""

    def __init__(
        self,
        commands: Sequence[ChildCommand],
        settings: ChildrenSettings,
        runtime: Runtime,
        *,
        is_pressed: Callable[[], bool],
    ) -> None:
        """Nothing is started before `beside`.

        `is_pressed` tells whether what is not compacted is about to hold writes back.
        """
        self._commands = commands
        self._is_pressed = is_pressed
        self._settings = settings
        self._clock = runtime.clock
        self._random = runtime.random
        self._processes: dict[str, Process] = {}
        self.reports = ChildReports(runtime.clock)
        self._stopping = asyncio.Event()

    async def beside(self, serving: Coroutine[Any, Any, None]) -> None:
        """Run the children while `serving` runs, then end them; raises what `serving` raises."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            for command in self._commands:
                tasks.create_task(self._keep(command), name=command.role)
            if any(command.role == COMPACTOR for command in self._commands):
                tasks.create_task(self._hurry_when_pressed(), name="hurry")
            try:
                await serving
            except Exception as error:  # noqa: BLE001 - raised below, when the children have ended
                failure = error
            finally:
                self._stopping.set()
        if failure is not None:
            raise failure

    def hurry(self) -> None:
        """Tell the compactor that what is not compacted holds writes back."""
        process = self._processes.get(COMPACTOR)
        pipe = process.stdin if process is not None else None
        # A compactor that does not read has been told already.
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

    async def _keep(self, command: ChildCommand) -> None:
        settings = self._settings
        delay_ms = float(settings.child_restart_initial_ms)
        while not self._stopping.is_set():
            began_ms = self._clock.monotonic_ms()
            code = await self._run(command)
            log = _log.bind(child=command.role, exit_code=code)
            if self._stopping.is_set():
                return
            if code is not None and code in STAY_DOWN:
                log.error("child process stays down", problem=STAY_DOWN[code])
                if code != ExitCode.FENCED or not await self._is_missed():
                    return
                log.warning("child process is started again: nobody else does its work")
                continue
            if self._clock.monotonic_ms() - began_ms >= settings.child_restart_max_ms:
                delay_ms = settings.child_restart_initial_ms
            jittered_ms = self._random.uniform(delay_ms / 2, delay_ms)
            log.warning("child process has ended", restart_ms=round(jittered_ms))
            await self._wait_ms(jittered_ms)
            delay_ms = min(2 * delay_ms, settings.child_restart_max_ms)

    async def _is_missed(self) -> bool:
        """Wait until writes have been held back for long; False: we were asked to stop before.

        Whoever took over may have died since, such as the child of a writer that was fenced.
        """
        pressed_ms = 0
        while not self._stopping.is_set():
            await self._wait_ms(PRESSURE_POLL_MS)
            pressed_ms = pressed_ms + PRESSURE_POLL_MS if self._is_pressed() else 0
            if pressed_ms >= self._settings.child_takeover_ms:
                return True
        return False

    async def _run(self, command: ChildCommand) -> int | None:
        """Start it and wait for its end; its exit code, None when it could not be started."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command.argv,
                stdin=PIPE,
                stdout=PIPE,  # for its reports; its log goes where ours goes
                limit=LINE_BYTES_MAX,
                env=_environment(os.environ) | dict(command.secrets),
                start_new_session=True,  # a Ctrl-C is for this process, which then ends its own
            )
        except OSError as error:
            _log.error("child process cannot start", child=command.role, problem=str(error))
            return None
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        _log.info("child process started", child=command.role, pid=process.pid)
        self._processes[command.role] = process
        try:
            return await self._ended(command.role, process)
        finally:
            del self._processes[command.role]

    async def _ended(self, role: str, process: Process) -> int:
        """Wait for its end, and see to it once we are asked to stop; its exit code."""
        async with asyncio.TaskGroup() as tasks:
            assert process.stdout is not None
            reading = tasks.create_task(self.reports.read(role, process.stdout))
            ending = tasks.create_task(self._end(process))
            code = await process.wait()
            # Its last word may stand in the pipe, whose end whoever has inherited it can hold open.
            await asyncio.wait([reading], timeout=LAST_REPORT_MS / 1_000)
            reading.cancel()
            ending.cancel()
        return code

    async def _end(self, process: Process) -> None:
        await self._stopping.wait()
        if process.stdin is not None:
            process.stdin.close()
        for number, send in ((signal.SIGTERM, os.kill), (signal.SIGKILL, os.killpg)):
            await self._clock.sleep_ms(self._settings.child_grace_ms)
            _log.warning("child process goes on", pid=process.pid, sent=number.name)
            with suppress(ProcessLookupError):
                send(process.pid, number)  # the last one reaches what it has started as well

    async def _wait_ms(self, duration_ms: float) -> None:
        """Wait, but no longer than until we are asked to stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_ms / 1000):
                await self._stopping.wait()


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Ours without settings: what a child is told of them, nothing contradicts."""
    return {k: v for k, v in inherited.items() if not k.upper().startswith(ENVIRONMENT_PREFIX)}
