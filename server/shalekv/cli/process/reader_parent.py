r"""The parent of `shalekv reader --processes N`: it has the port, and keeps N readers running.

    starting ---> serving ---- ended ------------> waiting, longer each time ---> starting
       |             |  \----- silent for long: SIGKILL --^
       |             |
       +-------------+--- stop requested: told, then SIGKILL after the grace

If a process ends with an error before all have served once, or with a code of `ENDS_ALL`, all end
with its code: another start would end in the same way. Only conflicts are tried again: processes
that start together all edit the manifest.

The parent accepts connections, and hands each over to the process that has the fewest. Requests do
not pass through it, and it does not open the database. `cli.process.reader_messages` has the
messages, and says how the processes answer for all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import nullcontext, suppress
from random import SystemRandom

import structlog

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.process.endpoint import announce_metrics, binding_metrics
from shalekv.cli.process.lifecycle import bind_port
from shalekv.cli.process.reader import ROLE
from shalekv.cli.process.reader_messages import (
    MESSAGE_BYTES_MAX,
    Asked,
    Begin,
    ChildState,
    ChildTrouble,
    Question,
    ToChild,
    ToParent,
    Whole,
    fitting,
)
from shalekv.cli.process.shutdown import StopRequest, on_hangup
from shalekv.cli.process.supervisor import RestartDelay, child_environment
from shalekv.clock import MachineClock
from shalekv.rpc.native_server import (
    CONNECTION,
    DOOR,
    FOR_METRICS,
    accepted,
    address_of,
    bind,
    release,
)
from shalekv.server.replies.whole_costs import add_statistics, add_unended
from shalekv.settings import ReaderConfig
from shalekv.settings.budget import memory_budget
from shalekv.telemetry.metrics import Metrics, decode_metrics
from shalekv.telemetry.process_use import add_process_use
from shalekv.v1 import admin_pb2

PING_MS = 1_000
# Unanswered pings. They are counted, since a clock goes on while the parent itself is stopped.
SILENT_PINGS = 5  # after them the whole server is not ready
HUNG_PINGS = 30  # after them the process is killed: nothing that it does takes as long
# How long an answer for all waits for the processes that were not asked themselves.
ANSWER_TIMEOUT_MS = 1_500
# Beyond shutdown_grace_ms: for the last replies, and for deleting snapshots.
LAST_STEPS_MS = 5_000
# Codes with which the next process would end as well: the whole server ends with them.
ENDS_ALL = frozenset({ExitCode.USAGE, ExitCode.DATABASE_NOT_FOUND, ExitCode.DAMAGED})
STARTED_BY_ITSELF = ("-m", "shalekv.cli.process.reader")

_State = admin_pb2.ProcessStatus.State

_log = structlog.get_logger(__name__)


class Child:
    """One process, from its start to its end."""

    def __init__(self, process: Process, writer: asyncio.StreamWriter, door: socket.socket) -> None:
        """`door` is the socket through which connections are handed over."""
        self.process = process
        self.connections = 0  # as it has told, and those that were handed over since
        self.serving_ms: float | None = None  # since when; None: it does not serve yet
        self.trouble: ChildTrouble | None = None
        self.stats = admin_pb2.StatsReply()  # the last that it has told
        self.metrics = Metrics()  # the last that somebody has asked for
        self.unanswered = 0  # pings
        self._door = door
        self._writer = writer
        self._answers: dict[Question, asyncio.Future[bytes]] = {}

    @property
    def is_silent(self) -> bool:
        """True if it has not answered for some seconds."""
        return self.unanswered >= SILENT_PINGS

    @property
    def state(self) -> admin_pb2.ProcessStatus.State.ValueType:
        """Its state, for a status."""
        if self.is_silent:
            return _State.STATE_SILENT
        return _State.STATE_STARTING if self.serving_ms is None else _State.STATE_SERVING

    def send(self, message: ToChild) -> None:
        """Send a message, unless the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(message.line())

    def ping(self, trouble: ChildTrouble | None) -> None:
        """Send a ping with the trouble of another process; kill one that has not answered many."""
        self.unanswered += 1
        if self.unanswered > HUNG_PINGS:
            self.kill()
        elif self.unanswered <= SILENT_PINGS:  # one that does not read needs no more of them
            self.send(ToChild(is_ping=True, trouble=trouble))

    def give(self, kind: bytes, connection: socket.socket) -> bool:
        """Hand over a connection. Returns False if the process does not take it."""
        try:
            socket.send_fds(self._door, [kind], [connection.fileno()])
        except OSError:  # it has ended, or has not taken those before
            return False
        self.connections += kind == CONNECTION
        return True

    async def ask(self, question: Question) -> bytes:
        """Ask it for something; empty if it does not answer in time, or ends before."""
        answer = self._answers.get(question)
        if answer is None:
            answer = self._answers[question] = asyncio.get_running_loop().create_future()
            self.send(ToChild(ask=question))
        timeout_ms = question.duration_ms + ANSWER_TIMEOUT_MS
        try:
            done, _ = await asyncio.wait([answer], timeout=timeout_ms / 1_000)
        finally:
            if question.profile_id:  # nobody asks it again, also if it is withdrawn
                self._answers.pop(question, None)
        return done.pop().result() if done else b""

    def receive(self, message: ToParent, now_ms: float) -> None:
        """Handle what the process tells about itself."""
        if message.is_serving:
            self.serving_ms = now_ms
            self.unanswered = 0
        if message.is_ending:
            self.serving_ms = None
        if message.pong is not None:
            self.unanswered = 0
            self.trouble = message.pong.trouble
            self.connections = message.pong.connections
        if message.answers is not None:
            self._receive_answer(message.answers, message.answer)

    def _receive_answer(self, question: Question, answer: bytes) -> None:
        waiting = self._answers.pop(question, None)
        if waiting is not None:
            waiting.set_result(answer)
        if answer and question.asked is Asked.METRICS:
            self.metrics = decode_metrics(answer)
        if answer and question.asked is Asked.STATS:
            self.stats = admin_pb2.StatsReply.FromString(answer)

    def kill(self) -> None:
        """Send SIGKILL."""
        with suppress(ProcessLookupError):
            self.process.kill()

    def close(self) -> None:
        """Close the sockets, at its end; what it was asked has no answer."""
        self._writer.close()
        self._door.close()
        for answer in self._answers.values():
            answer.set_result(b"")
        self._answers.clear()


class ChildPlace:
    """One of the numbers of processes: the process that has it, and what those before it did."""

    def __init__(self, number: int, now_ms: float) -> None:
        self.number = number
        self.began_ms = now_ms
        self.replacements = 0
        self.starts = self.crashes = 0
        self.child: Child | None = None
        # What those that have ended have counted.
        self._stats = admin_pb2.StatsReply()
        self._metrics = Metrics()

    def state(self, now_ms: float, answer: bytes = b"") -> ChildState:
        """Describe it."""
        child = self.child
        serving_ms = child.serving_ms if child is not None else None
        return ChildState(
            number=self.number,
            state=_State.STATE_ENDED if child is None else child.state,
            pid=0 if child is None else child.process.pid,
            uptime_ms=0 if serving_ms is None else int(now_ms - serving_ms),
            replacements=self.replacements,
            began_ms=int(now_ms - self.began_ms),
            answer=answer,
        )

    def fill(self, metrics: Metrics, asking: Child, *, has_answered: bool) -> None:
        """Add what its processes have told, but for the one that asks.

        Of one that has not answered, and of those that have ended, that is what they have counted:
        no sum that somebody has seen was greater.
        """
        metrics.merge(self._metrics)
        if self.child is not None and self.child is not asking:
            told = self.child.metrics
            metrics.merge(told if has_answered else told.cumulative())
        name = f"{ROLE}-{self.number}"
        metrics.add("child_running", int(self.child is not None), name)
        metrics.add("child_starts", self.starts, name)
        metrics.add("child_crashes", self.crashes, name)

    def stats(self, asking: Child) -> bytes:
        """Add up what its processes have told, but for the one that asks.

        One that does not answer has told its own with each pong: the last second may be missing.
        """
        stats = admin_pb2.StatsReply()
        stats.CopyFrom(self._stats)
        if self.child is not None and self.child is not asking:
            add_statistics(stats, self.child.stats)
        return stats.SerializeToString()

    def trouble(self) -> ChildTrouble | None:
        """Why reads fail at this process; None: they don't, or it has no connections."""
        child = self.child
        if child is None or child.serving_ms is None:
            return None
        if child.is_silent:
            problem = f"process {self.number} (pid {child.process.pid}) does not answer"
            silent_ms = child.unanswered * PING_MS
            return ChildTrouble(cause="process silent", problem=problem, duration_ms=silent_ms)
        return child.trouble

    def end(self) -> None:
        """The process has ended."""
        if self.child is not None:
            add_statistics(self._stats, self.child.stats)
            add_unended(self._stats)
            self._metrics.merge(self.child.metrics.cumulative())
            self.child.close()
        self.child = None
        self.replacements += 1


class ReaderParent:
    """The processes of one server, and the port that they share."""

    def __init__(self, settings: ReaderConfig) -> None:
        """`settings` are those of each process."""
        self.code = ExitCode.OK  # with which a process has ended all of them
        self._settings = settings
        self._clock = MachineClock()
        self._began_ms = self._clock.monotonic_ms()
        count = settings.reader.processes
        self._places = [ChildPlace(number, self._began_ms) for number in range(1, count + 1)]
        self._stop = StopRequest()
        self._serving = asyncio.Event()  # a process serves now
        self._served = asyncio.Event()  # all have served

    async def serve(self, settings: ReaderConfig, announce: Callable[[str], None]) -> None:
        """Serve until a signal requests a stop, or a process ends for a reason that concerns all.

        `announce` is called with HOST:PORT when all processes serve.

        Raises `InvalidSetting`, and OSError: EADDRINUSE, when another process has the port.
        """
        metrics = self._bind_metrics(settings)
        sockets = bind_port(lambda: bind(settings.server.listen))
        listen = address_of(settings.server.listen, sockets)
        self._log_memory(settings)
        has_audit_log = bool(settings.access.audit_log)
        with self._stop, on_hangup(self._reopen) if has_audit_log else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                for place in self._places:
                    tasks.create_task(self._supervise(place))
                until_stop = [tasks.create_task(self._accept_calls(each)) for each in sockets]
                until_stop += [tasks.create_task(self._accept_scrapes(each)) for each in metrics]
                until_stop.append(tasks.create_task(self._ping()))
                until_stop.append(tasks.create_task(self._announce(announce, listen)))
                await self._stop.requested.wait()
                for task in until_stop:
                    task.cancel()
                for each in (*sockets, *metrics):
                    each.close()
        release(listen)
        if not self.code:
            _log.info("stopped")

    def _bind_metrics(self, settings: ReaderConfig) -> list[socket.socket]:
        """Bind the port of the metrics; empty: there is none. Raises as `serve`."""
        listen = settings.telemetry.metrics
        if not listen:
            return []
        with binding_metrics():
            sockets = bind(listen)
        scheme = "https" if settings.tls.has_certificate else "http"
        announce_metrics(f"{scheme}://{address_of(listen, sockets)}/metrics", settings.server)
        return sockets

    def _reopen(self) -> None:
        """Let all processes open their audit log again, also one that has just been started."""
        for place in self._places:
            if place.child is not None:
                place.child.send(ToChild(is_reopen=True))

    def _log_memory(self, settings: ReaderConfig) -> None:
        budget, count = memory_budget(settings), len(self._places)
        _log.info(
            "memory divided",
            processes=count,
            sum_bytes=count * budget.sum_bytes,
            bytes_of_each=budget.sum_bytes,
        )

    async def _announce(self, announce: Callable[[str], None], listen: str) -> None:
        await self._served.wait()
        announce(listen)

    async def _accept_calls(self, listener: socket.socket) -> None:
        """Accept connections, and hand each over.

        They wait while no process serves, and before all have served: they would all go to the
        first.
        """
        await self._served.wait()
        while True:
            await self._serving.wait()
            with await accepted(listener) as connection:
                await self._serving.wait()
                self._give(CONNECTION, connection)

    async def _accept_scrapes(self, listener: socket.socket) -> None:
        """Accept connections to the endpoint of metrics; each process answers for all of them.

        One that opens the database can say that it lives.
        """
        while True:
            with await accepted(listener) as connection:
                self._give(FOR_METRICS, connection)

    def _give(self, kind: bytes, connection: socket.socket) -> None:
        children = [place.child for place in self._places if place.child is not None]
        if kind == CONNECTION:
            children = [child for child in children if child.serving_ms is not None]
        # A silent one has the least chance to answer.
        for child in sorted(children, key=_worth):
            if child.give(kind, connection):
                return
        _log.error("a connection is closed: no process takes it")

    async def _ping(self) -> None:
        while True:
            await self._clock.sleep_ms(PING_MS)
            for place in self._places:
                if place.child is not None and place.child.serving_ms is not None:
                    others = (each.trouble() for each in self._places if each is not place)
                    place.child.ping(next(filter(None, others), None))

    async def _supervise(self, place: ChildPlace) -> None:
        """Keep a process running until the stop."""
        restarts = RestartDelay(SystemRandom())
        while not self._stop.requested.is_set():
            began_ms = self._clock.monotonic_ms()
            code = await self._run(place)
            if self._stop.requested.is_set():
                return
            place.crashes += code != ExitCode.OK
            log = _log.bind(process=place.number, exit_code=code)
            is_first = not self._served.is_set()
            if code in ENDS_ALL or (is_first and code > 0 and code != ExitCode.CONFLICT):
                self.code = ExitCode(code) if code in {*ExitCode} else ExitCode.UNEXPECTED
                log.error("all processes are stopped: another start would end like this one")
                self._stop.request()
                return
            delay_ms = restarts.next_ms(self._clock.monotonic_ms() - began_ms)
            log.warning("process has ended", restart_ms=round(delay_ms))
            await self._wait_ms(delay_ms)

    async def _run(self, place: ChildPlace) -> int:
        """Start a process, and wait for its end. Returns its exit code; below 0: a signal."""
        (ours, theirs), (door, their_door) = socket.socketpair(), socket.socketpair(*DOOR)
        door.settimeout(0)
        try:
            with theirs, their_door:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *STARTED_BY_ITSELF,
                    str(their_door.fileno()),
                    stdin=theirs.fileno(),
                    stdout=DEVNULL,
                    pass_fds=[their_door.fileno()],
                    env=child_environment(os.environ),
                    start_new_session=True,  # Ctrl-C reaches this process only, which tells others
                )
            reader, writer = await asyncio.open_connection(sock=ours, limit=MESSAGE_BYTES_MAX)
        except OSError as error:
            ours.close()
            door.close()
            _log.error("process cannot start", process=place.number, problem=str(error))
            return -signal.SIGKILL
        _log.info("process started", process=place.number, pid=process.pid)
        child = place.child = Child(process, writer, door)
        place.starts += 1
        child.send(ToChild(begin=Begin(number=place.number, settings=self._settings)))
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(place, child, reader))
            ending = tasks.create_task(self._end(child))
            code = await process.wait()
            reading.cancel()
            ending.cancel()
        place.end()
        self._note_serving()
        return code

    def _note_serving(self) -> None:
        children = [place.child for place in self._places]
        serving = [
            child for child in children if child is not None and child.serving_ms is not None
        ]
        if len(serving) == len(children):
            self._served.set()
        if serving:
            self._serving.set()
        else:
            self._serving.clear()

    async def _read(self, place: ChildPlace, child: Child, reader: asyncio.StreamReader) -> None:
        telling: dict[Question, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            with suppress(ConnectionError):
                while (line := await reader.readline()).endswith(b"\n"):
                    message = ToParent.model_validate_json(line)
                    child.receive(message, self._clock.monotonic_ms())
                    if message.is_serving:
                        _log.info("process serves", process=place.number, pid=child.process.pid)
                    self._note_serving()
                    telling = {each: task for each, task in telling.items() if not task.done()}
                    if message.collect is not None:
                        task = tasks.create_task(self._tell(child, message.collect))
                        telling[message.collect] = task
                    if message.withdraw in telling:
                        telling[message.withdraw].cancel()

    async def _tell(self, asking: Child, question: Question) -> None:
        """Send the states and the answers of all processes to the one that asks.

        If it is cancelled, the others do not go on with a profile.
        """
        children = [place.child for place in self._places]
        others = [child if child is not asking else None for child in children]
        try:
            answers = await asyncio.gather(*(_answer(child, question) for child in others))
        except asyncio.CancelledError:
            for child in filter(None, others) if question.profile_id else ():
                child.send(ToChild(withdraw=question))
            raise
        asked = question.asked
        now_ms = self._clock.monotonic_ms()
        if asked is Asked.METRICS:
            metrics = Metrics()
            add_process_use(metrics, ROLE)
            for place, answer in zip(self._places, answers, strict=True):
                place.fill(metrics, asking, has_answered=bool(answer))
            whole = Whole(question=question, metrics=metrics.encode())
            asking.send(ToChild(whole=whole))
            return
        if asked is Asked.STATS:
            answers = [place.stats(asking) for place in self._places]
        fit = zip(self._places, fitting(answers), strict=True)
        states = tuple(place.state(now_ms, answer) for place, answer in fit)
        uptime_ms = int(now_ms - self._began_ms)
        whole = Whole(question=question, uptime_ms=uptime_ms, children=states)
        asking.send(ToChild(whole=whole))

    async def _end(self, child: Child) -> None:
        """End a process when a stop is requested."""
        await self._stop.requested.wait()
        child.send(ToChild(is_stop=True))
        await self._clock.sleep_ms(self._settings.server.shutdown_grace_ms + LAST_STEPS_MS)
        _log.warning("process does not end: killed", pid=child.process.pid)
        child.kill()

    async def _wait_ms(self, duration_ms: float) -> None:
        """Wait for a duration, or until a stop is requested."""
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_ms / 1_000):
                await self._stop.requested.wait()


def _worth(child: Child) -> tuple[bool, bool, int]:
    """Order processes by their chance to answer, the best first, and by their connections."""
    return child.is_silent, child.serving_ms is None, child.connections


async def _answer(child: Child | None, question: Question) -> bytes:
    if child is None or child.state != _State.STATE_SERVING:
        return b""
    return await child.ask(question)
