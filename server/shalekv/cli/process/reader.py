"""The process of `shalekv reader`: it joins the database, and serves reads until it is stopped.

With `--processes` it is one of several that serve on one port, and is started by
`cli.process.reader_parent`. `cli.process.reader_messages` has what they tell each other.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import NamedTuple, TypeVar, cast
from uuid import uuid4

import structlog

from shalekv.cli.process.access import ProcessAccess, open_access, running_beside
from shalekv.cli.process.endpoint import bound, sources_of
from shalekv.cli.process.lifecycle import (
    bind,
    open_audit_log,
    open_behind,
    open_database,
    open_runtime,
    run_role,
    run_server,
    start_serving,
)
from shalekv.cli.process.peers import open_links
from shalekv.cli.process.reader_messages import (
    MESSAGE_BYTES_MAX,
    Asked,
    ChildState,
    ChildTrouble,
    Pong,
    Question,
    ToChild,
    ToParent,
    Whole,
)
from shalekv.cli.process.shutdown import SIGNALLED, STOP_SIGNALS, Shutdown, StopRequest
from shalekv.cli.process.traces import open_tracer
from shalekv.clock import MachineClock
from shalekv.errors import Overloaded, ShaleError
from shalekv.replica.join import OPEN_TIMEOUT_MS
from shalekv.rpc.native_server import Door
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime
from shalekv.server.access.admin import AccessAdmin
from shalekv.server.reader import Reader
from shalekv.server.reader_service import ReaderAdmin, ReaderKv
from shalekv.server.readiness import Readiness
from shalekv.server.replies.profile import profile_reply
from shalekv.server.replies.whole_costs import add_origins, add_statistics
from shalekv.server.requests import check_header
from shalekv.server.service import Answer, Call
from shalekv.server.snapshots import SnapshotAdmin
from shalekv.server.status import ProcessReport, costs_of
from shalekv.server.whole_status import add_slow_calls, add_status
from shalekv.settings import ReaderConfig
from shalekv.store.api import ObjectStore
from shalekv.store.retry import RefusalPolicy
from shalekv.telemetry.metrics import Metrics, decode_metrics
from shalekv.telemetry.profile import OtherProcesses, take_samples
from shalekv.telemetry.sources import MetricSources
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.watch.stream import Watches
from shalekv.wording import Trouble
from shalekv.write.quorum.links import Links

ROLE = "reader"
# How long a status waits for the parent, which waits for the other processes.
WHOLE_TIMEOUT_MS = 2_000

_STATUS, _METRICS = Question(asked=Asked.STATUS), Question(asked=Asked.METRICS)
_STATS, _SLOW_CALLS = Question(asked=Asked.STATS), Question(asked=Asked.SLOW_CALLS)

ReplyT = TypeVar("ReplyT")

_STANDARD_INPUT = 0

_log = structlog.get_logger(__name__)


class Place(NamedTuple):
    """The place of this process among several."""

    number: int
    parent: socket.socket
    door: Door  # through which the connections come


class ParentLink:
    """The socket to the parent."""

    def __init__(self, place: Place, shutdown: Shutdown, reopen: Callable[[], None]) -> None:
        """`shutdown` is requested by the parent, and by its end; `reopen` by the parent."""
        self.place = place
        self._reopen = reopen
        self.changed = asyncio.Event()  # set at each message; the consumer clears it
        self.is_pinged = False  # until the consumer clears it
        self.asked: set[Question] = set()  # as well
        self.withdrawn: set[Question] = set()  # as well
        self._shutdown = shutdown
        self._is_stopping = False
        self._trouble: Trouble | None = None
        self._wholes: dict[Question, asyncio.Future[Whole]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._clock = MachineClock()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Read what the parent sends, while entered."""
        reader, self._writer = await asyncio.open_connection(
            sock=self.place.parent, limit=MESSAGE_BYTES_MAX
        )
        try:
            async with running_beside(self._read(reader)):
                yield
        finally:
            self._writer.close()

    @property
    def trouble(self) -> Trouble | None:
        """The trouble of another process that serves on the port."""
        return self._trouble

    def send(self, message: ToParent) -> None:
        """Send a message; it is lost if the parent has ended."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(message.line())

    async def whole(self, question: Question) -> Whole | None:
        """Ask for all processes; None if the parent does not answer in time."""
        whole = self._wholes.get(question)
        if whole is None:
            whole = self._wholes[question] = asyncio.get_running_loop().create_future()
            self.send(ToParent(collect=question))
        timeout_ms = question.duration_ms + WHOLE_TIMEOUT_MS
        try:
            done, _ = await asyncio.wait([whole], timeout=timeout_ms / 1_000)
        except asyncio.CancelledError:
            if question.profile_id:
                self._wholes.pop(question, None)
                self.send(ToParent(withdraw=question))
            raise
        if not done and self._wholes.get(question) is whole:
            del self._wholes[question]
        return done.pop().result() if done else None

    async def others(self, question: Question) -> Mapping[int, bytes]:
        """Return the answers of the other processes, by number; empty: it has not answered.

        Raises `Overloaded` if the parent does not answer.
        """
        whole = _known(await self.whole(question))
        return {
            child.number: child.answer
            for child in whole.children
            if child.number != self.place.number
        }

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                self._receive(ToChild.model_validate_json(line))
        if self._is_stopping:
            os._exit(SIGNALLED + STOP_SIGNALS[0])  # a second signal has ended the parent at once
        _log.warning("asked to stop: the parent process has ended")
        self._shutdown.request()

    def _receive(self, message: ToChild) -> None:
        if message.is_reopen:
            self._reopen()
        if message.is_stop:
            self._is_stopping = True
            self._shutdown.request()
        if message.whole is not None:
            whole = self._wholes.pop(message.whole.question, None)
            if whole is not None:
                whole.set_result(message.whole)
        if message.is_ping:
            self._trouble = self._trouble_of(message.trouble)
        self.is_pinged |= message.is_ping
        if message.ask is not None:
            self.asked.add(message.ask)
        if message.withdraw is not None:
            self.withdrawn.add(message.withdraw)
        self.changed.set()

    def _trouble_of(self, told: ChildTrouble | None) -> Trouble | None:
        if told is None:
            return None
        since_ms = self._clock.monotonic_ms() - told.duration_ms
        return Trouble(told.cause, told.problem, since_ms)


def _known(whole: Whole | None) -> Whole:
    """Raise `Overloaded` if the parent has not answered: without the others, sums would be less."""
    if whole is None:
        message = "the parent of this process does not answer: what others count is not known"
        raise Overloaded(message, retry_after_ms=WHOLE_TIMEOUT_MS)
    return whole


class WholeMetrics:
    """The metrics of all processes that share the port: counters never become less."""

    def __init__(self, sources: MetricSources, link: ParentLink) -> None:
        """`sources` are those of this process."""
        self.link = link
        self._sources = sources
        # What is told later must not be older: the parent keeps the last that it was told.
        self._telling = asyncio.Lock()
        self._collecting = asyncio.Lock()

    async def own(self) -> bytes:
        """Return the metrics of this process, which the caller sends without waiting."""
        async with self._telling:
            return (await self._sources.collect()).encode()

    async def collect(self) -> Metrics:
        """Return the sums over all processes. Raises `Overloaded` if the parent does not answer."""
        async with self._collecting:
            own = await self.own()
            self.link.send(ToParent(answers=_METRICS, answer=own))
            whole = _known(await self.link.whole(_METRICS))
        metrics = decode_metrics(whole.metrics)
        metrics.merge(decode_metrics(own))
        return metrics


class SharedReader:
    """A reader that is one of several processes; its admin service answers for all of them."""

    def __init__(self, reader: Reader, server: Server, metrics: WholeMetrics) -> None:
        """`server` has the calls of this process, `metrics` those of all."""
        link = metrics.link
        self.admin = WholeAdmin(reader.admin, server, link, self.readiness)
        self._reader = reader
        self._link = link
        self._metrics = metrics
        self._clock = MachineClock()

    @property
    def kv(self) -> ReaderKv:
        """The data API, of this process alone."""
        return self._reader.kv

    @property
    def watches(self) -> Watches:
        """The watch API, of this process alone."""
        return self._reader.watches

    @property
    def epoch(self) -> int:
        """The epoch of the reader."""
        return self._reader.epoch

    def readiness(self) -> Readiness:
        """The readiness of all processes: a connection may be given to any of them."""
        own = self._reader.readiness()
        return Readiness(own.reads or self._link.trouble, takes_writes=False)

    async def run(self) -> None:
        """Run the reader, and answer the parent meanwhile."""
        try:
            async with running_beside(self._answer()):
                await self._reader.run()
        finally:
            self._link.send(ToParent(is_ending=True))

    async def ended(self) -> ShaleError | None:
        """Wait until the reader has ended, as `Reader.ended`."""
        return await self._reader.ended()

    def close(self) -> None:
        """Stop following, as `Reader.close`; this process gets no more connections."""
        self._link.send(ToParent(is_ending=True))
        self._reader.close()

    async def release(self, timeout_ms: float) -> None:
        """Delete the snapshots that protect reads, as `Reader.release`."""
        await self._reader.release(timeout_ms)

    async def _answer(self) -> None:
        link, profiles = self._link, dict[Question, asyncio.Task[None]]()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await link.changed.wait()
                link.changed.clear()
                if link.is_pinged:
                    link.is_pinged = False
                    link.send(ToParent(pong=self._pong()))
                    self.admin.tell_stats()
                profiles = {each: task for each, task in profiles.items() if not task.done()}
                for question in profiles.keys() & link.withdrawn:
                    profiles[question].cancel()
                for question in link.asked - link.withdrawn:
                    task = tasks.create_task(self._tell(question), name="tell the parent")
                    if question.profile_id:
                        profiles[question] = task
                link.asked.clear()
                link.withdrawn.clear()

    async def _tell(self, question: Question) -> None:
        answer = b""
        with suppress(ShaleError):  # then it is missing from the whole
            match question.asked:
                case Asked.STATUS:
                    answer = (await self.admin.own_status()).SerializeToString()
                case Asked.METRICS:
                    answer = await self._metrics.own()
                case Asked.STATS:
                    self.admin.tell_stats()
                    return
                case Asked.SLOW_CALLS:
                    answer = self.admin.own_slow_calls().SerializeToString()
                case Asked.PROFILE:
                    answer = await take_samples(question.duration_ms)
        self._link.send(ToParent(answers=question, answer=answer))

    def _pong(self) -> Pong:
        told, trouble = None, self._reader.readiness().reads
        if trouble is not None:
            since_ms = int(max(0.0, self._clock.monotonic_ms() - trouble.since_ms))
            told = ChildTrouble(cause=trouble.cause, problem=trouble.problem, duration_ms=since_ms)
        return Pong(trouble=told, connections=self._link.place.door.connection_count)


class WholeAdmin:
    """Implements `server.service.AdminService` for all processes that share the port."""

    def __init__(
        self,
        own: ReaderAdmin,
        server: Server,
        link: ParentLink,
        readiness: Callable[[], Readiness],
    ) -> None:
        """`own` is the service of this process, `readiness` that of all of them."""
        self._own = own
        self._server = server
        self._link = link
        self._readiness = readiness
        self._clock = MachineClock()

    @property
    def report(self) -> ProcessReport:
        """The part of a status that describes this process."""
        return self._own.report

    @property
    def snapshots(self) -> SnapshotAdmin:
        """The calls about snapshots, which concern the database."""
        return self._own.snapshots

    @property
    def access(self) -> AccessAdmin:
        """The calls about access, which concern the database, or the caller."""
        return self._own.access

    def header(self) -> kv_pb2.ReplyHeader:
        """Make the header of a reply that shows all that this process shows."""
        return self._own.header()

    def ingest_sst(
        self, request: admin_pb2.IngestSstRequest, call: Call
    ) -> Answer[admin_pb2.IngestSstReply]:
        """Raise `NotTheWriter`."""
        return self._own.ingest_sst(request, call)

    def profile(
        self, request: admin_pb2.ProfileRequest, call: Call
    ) -> Answer[admin_pb2.ProfileReply]:
        """Sample where all processes spend their time."""
        del call  # cancelled when its client has gone
        check_header(request.header)
        others = OtherProcesses(self._link.place.number, self._sample_others)
        return profile_reply(request, self.header, others)

    async def _sample_others(self, duration_ms: int) -> Mapping[int, bytes]:
        profile_id = uuid4().hex
        return await self._link.others(
            Question(asked=Asked.PROFILE, duration_ms=duration_ms, profile_id=profile_id)
        )

    def own_slow_calls(self) -> admin_pb2.ListSlowCallsReply:
        """List the slow calls of this process."""
        reply = admin_pb2.ListSlowCallsReply(header=self.header())
        self._server.fill_slow_calls(reply)
        return reply

    async def list_slow_calls(
        self, request: admin_pb2.ListSlowCallsRequest, call: Call
    ) -> admin_pb2.ListSlowCallsReply:
        """List the slow calls of the others; those of this process are left to `rpc`."""
        reply = await _answered(self._own.list_slow_calls(request, call))
        for number, answer in (await self._link.others(_SLOW_CALLS)).items():
            if answer:
                add_slow_calls(reply, admin_pb2.ListSlowCallsReply.FromString(answer).calls)
            else:
                reply.missing_processes.append(number)
        return reply

    async def own_status(self) -> admin_pb2.StatusReply:
        """Describe this process, its calls included."""
        reply = await _answered(self._own.status(admin_pb2.StatusRequest(), Call()))
        self._server.fill(reply)
        return reply

    async def status(self, request: admin_pb2.StatusRequest, call: Call) -> admin_pb2.StatusReply:
        """Describe all processes; the calls of this one are left to `rpc`, which counts them."""
        reply = await _answered(self._own.status(request, call))
        whole = await self._link.whole(_STATUS)
        if whole is None:
            return reply
        reply.uptime_ms = whole.uptime_ms
        own = admin_pb2.StatusReply(header=reply.header, calls=self._server.calls())
        for child in whole.children:
            other = admin_pb2.StatusReply.FromString(child.answer) if child.answer else None
            if child.number == self._link.place.number:
                reply.processes.append(_process(child, own))
                continue
            reply.processes.append(_process(child, other))
            if other is not None:
                add_status(reply, other)
        self._readiness().fill(reply, self._clock.monotonic_ms())
        return reply

    def tell_stats(self) -> admin_pb2.StatsReply:
        """Count the requests of this process, tell the parent, and return them.

        Requests and what calls have cost are of one moment.
        """
        stats = self._own.store_use.reply(self.header())
        self._server.fill_origins(stats)
        self._link.send(ToParent(answers=_STATS, answer=stats.SerializeToString()))
        return stats

    async def stats(self, request: admin_pb2.StatsRequest, call: Call) -> admin_pb2.StatsReply:
        """Count the requests of all processes, and of those before them.

        Raises `Overloaded` if the parent does not answer.
        """
        reply = await _answered(self._own.stats(request, call))
        own = self.tell_stats()
        whole = _known(await self._link.whole(_STATS))
        del reply.processes[:]
        origins = list[admin_pb2.OriginCost]()
        for child in whole.children:
            counted = admin_pb2.StatsReply.FromString(child.answer)
            if child.number == self._link.place.number:
                add_statistics(counted, own)
            reply.processes.add(role=ROLE, uptime_ms=child.began_ms)
            for process in counted.processes:
                reply.processes[-1].requests.extend(process.requests)
            origins += counted.origins
        add_origins(reply, origins)
        return reply


def _process(child: ChildState, status: admin_pb2.StatusReply | None) -> admin_pb2.ProcessStatus:
    return admin_pb2.ProcessStatus(
        number=child.number,
        state=cast("admin_pb2.ProcessStatus.State.ValueType", child.state),
        pid=child.pid,
        uptime_ms=child.uptime_ms,
        replacements=child.replacements,
        seq=status.header.seq if status is not None else 0,
        staleness_ms=status.header.staleness_ms if status is not None else 0,
        calls=sum(each.calls for each in status.calls) if status is not None else 0,
    )


async def _answered(answer: Answer[ReplyT]) -> ReplyT:
    return await answer if isinstance(answer, Awaitable) else answer


async def read_database(
    settings: ReaderConfig,
    announce: Callable[[str], None],
    place: Place | None = None,
) -> None:
    """Serve reads until a signal requests a stop; `announce` is called with HOST:PORT.

    With `place` this is one of several processes: connections come through its door.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be read, or the reader has failed.
    """
    sources = sources_of(ROLE)
    with StopRequest() as stop, open_audit_log(settings.access, "reader") as audit:
        link = None
        if place is not None:
            link = ParentLink(place, stop, _nothing if audit is None else audit.file.reopen)
        door, number = (None, 0) if place is None else (place.door, place.number)
        shared = None if link is None else WholeMetrics(sources, link)
        async with (
            nullcontext() if link is None else link.listening(),
            open_runtime(settings) as runtime,
            open_database(settings, runtime) as store,
            open_links(settings.tls, settings.server.wire) as links,
            open_access(settings, store, runtime, audit) as access,
            open_tracer(settings.telemetry, "reader", store.url) as tracer,
            nullcontext(costs_of(store, settings, runtime.clock)) as costs,
            bound(
                settings,
                sources,
                lambda: bind(settings, runtime, access.guard, door, tracer, costs, number),
                access,
                None if shared is None else (shared.link.place.door, shared),
            ) as server,
        ):
            _log.info("opening", url=store.url)
            opening = _open_reader(settings, store, runtime, links, access)
            reader = await open_behind(server, stop, opening)
            if reader is None:
                return
            role: Reader | SharedReader = reader
            if shared is not None:
                role = SharedReader(reader, server, shared)
            await start_serving(role, server, announce, audit)
            if link is not None:
                link.send(ToParent(is_serving=True))
            with sources.including(reader.admin.collect):
                await run_role(role, server, stop, settings.server.shutdown_grace_ms)
    _log.info("stopped")


async def _open_reader(
    settings: ReaderConfig,
    store: ObjectStore,
    runtime: Runtime,
    links: Links,
    access: ProcessAccess,
) -> Reader:
    with RefusalPolicy(store.sent, runtime).opening(OPEN_TIMEOUT_MS):
        await access.load()
    return await Reader.open(
        store, settings=settings, runtime=runtime, links=links, policies=access.policies
    )


def main() -> None:
    """Be one of several processes, as the parent says on standard input."""
    parent = socket.socket(fileno=os.dup(_STANDARD_INPUT))
    door = Door(socket.socket(fileno=int(sys.argv[1])))
    # Without a buffer, which would take the next messages as well.
    with parent.makefile("rb", buffering=0) as stream:
        line = stream.readline()
    begin = ToChild.model_validate_json(line).begin if line.endswith(b"\n") else None
    if begin is None:
        sys.exit(SIGNALLED + STOP_SIGNALS[0])  # the parent has ended

    async def serve(settings: ReaderConfig, _announce: Callable[[str], None]) -> None:
        await read_database(settings, _ignore, Place(begin.number, parent, door))

    sys.exit(run_server(begin.settings, serve, _ignore, process=begin.number))


def _nothing() -> None:
    """Open no audit log again: there is none."""


def _ignore(_listen: str) -> None:
    """Announce nothing: the parent does, when all processes serve."""


if __name__ == "__main__":
    main()
