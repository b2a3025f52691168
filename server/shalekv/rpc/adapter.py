"""Adapter from the calls of a transport to services: one kind of method for each shape of call.

What all calls need is done here: parsing, the limit of calls in progress, refusals, counts,
deadlines, and the status of an error. A call with one reply that is answered at once takes no task,
no future and no entry in a table; one that waits takes a callback at the future of its commit.

A call that fails ends with a status. The status is sent after the messages that were written
before; if the client does not read those, both are held until the client reads, cancels the call,
or its connection ends. So a stream whose client reads nothing is ended by a reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from structlog.contextvars import bind_contextvars

from shalekv.errors import (
    InvalidRequest,
    OutcomeUnknown,
    Overloaded,
    ShaleError,
    StreamTooSlow,
    raise_if,
)
from shalekv.read.memory_budget import MemoryBudget
from shalekv.rpc.call_counts import (
    NS_PER_US,
    CallCounts,
    MethodCount,
    TimedCall,
    code_of,
    method_of,
)
from shalekv.rpc.call_telemetry import CallTelemetry, NotedCall, NotedStream, Recorders
from shalekv.rpc.calls import ServerCall, StreamCall, Streaming, Unary, named
from shalekv.rpc.guarding import Guarding
from shalekv.rpc.running_stream import RunningStream, close_replies, forget_frames
from shalekv.rpc.session import Session
from shalekv.rpc.status import operation_error, row_of, status_of, status_of_bug
from shalekv.rpc.waiting_call import InProgress, WaitingCall, serialized
from shalekv.runtime import Runtime
from shalekv.server.access.guard import Guard, Permit
from shalekv.server.replies.costs import fill_origins
from shalekv.server.service import Answer, Call, DuplexStream, KvService, WatchService
from shalekv.server.whole_status import add_calls, add_refusals
from shalekv.settings import LimitSettings
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.v1 import kv_pb2
from shalekv.v1.admin_pb2 import StatsReply, StatusReply
from shalekv_wire.status import CallFailed, StatusCode
from shalekv_wire.trace_context import UNNAMED

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message | bytes)
SessionRequest = kv_pb2.SessionRequest
WatchRequest = kv_pb2.WatchRequest

# Advice with `Overloaded`: more calls than allowed are a burst, and some of them end by then.
RETRY_AFTER_MS = 100
FIRST_MESSAGE_S = 0.1
CUT_OFF = "this server ceased to be the writer before the call had ended"

_log = structlog.get_logger(__name__)


class Adapter:
    """Makes methods from services, limits the calls in progress, and refuses calls."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        calls_max: int,
        limits: LimitSettings | None = None,
        session_budget: MemoryBudget | None = None,
        guard: Guard | None = None,
        checked_as: Message | None = None,
        recorders: Recorders | None = None,
    ) -> None:
        """At most `calls_max` calls are in progress; more are refused with `Overloaded`.

        All sessions share `session_budget`. Without a `guard` every call is allowed; it is asked
        about `checked_as` in place of the requests, if that is given. Without `recorders` calls are
        counted, and no more.
        """
        limits = limits or LimitSettings()
        self._session_budget = session_budget or MemoryBudget(limits.sessions_bytes_max)
        self._stalled_ms = limits.result_stalled_ms
        self._runtime = runtime
        self.telemetry = CallTelemetry(recorders or Recorders(SlowCalls(0, runtime.clock)))
        self._calls_max = calls_max
        self._refusal: ShaleError | None = None
        self._streams: set[DuplexStream] = set()
        self._cleanups: set[asyncio.Task[None]] = set()  # that run on when their call has ended
        self._in_progress: set[InProgress] = set()
        self._idle_delays = 0  # calls in progress for which `idle` waits
        self._idle = asyncio.Event()
        self._idle.set()
        calls = self.telemetry.counts.by_principal
        self._guarding = Guarding(guard, runtime.clock, checked_as, calls)

    @property
    def counts(self) -> CallCounts:
        """The counts of calls and refusals."""
        return self.telemetry.counts

    @property
    def in_progress_count(self) -> int:
        """The calls that have begun and not ended."""
        return len(self._in_progress)

    def fill(self, status: StatusReply) -> None:
        """Add the counts of calls, and of those that the guard has refused, to a status."""
        add_calls(status, self.counts.statuses())
        if self._guarding.guard is not None:
            add_refusals(status, self._guarding.guard.status())

    def fill_origins(self, reply: StatsReply) -> None:
        """Add to statistics what the calls of this process have cost."""
        costs = self.telemetry.costs
        if costs is not None:
            self._tell_calls(costs)
            calls = {count.method: count.durations_us.count for count in self.counts}
            fill_origins(reply, costs, calls)

    def collect_costs(self, metrics: Metrics) -> None:
        """Add to metrics what the calls of this process have cost."""
        costs = self.telemetry.costs
        if costs is not None:
            self._tell_calls(costs)
            costs.collect(metrics)

    def _tell_calls(self, costs: Costs) -> None:
        for principal, calls in self.counts.by_principal.take().items():
            costs.add_calls(principal, calls)

    def refuse(self, error: ShaleError) -> None:
        """Refuse every call, and every operation of a session, that begins from now on.

        Watches, which would never end, end with `error` as well.
        """
        self._refusal = error
        for stream in self._streams:
            stream.refuse(error)

    async def idle(self) -> None:
        """Wait until no calls are in progress but watches and `duplex` streams.

        These end only when they are refused or their clients go.
        """
        await self._idle.wait()

    def cut_off(self) -> None:
        """Cancel all calls in progress; their clients get `OutcomeUnknown`."""
        for running in [*self._in_progress]:
            running.cut_off(OutcomeUnknown(CUT_OFF))

    async def wait_for_cleanups(self, timeout_s: float) -> None:
        """Wait for the work that watches do at their end. REQUIRES: no calls are in progress."""
        if self._cleanups:
            _, late = await asyncio.wait(self._cleanups, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def refusing_method(self) -> Streaming:
        """Return a method of any shape that ends each call with the error given to `refuse`."""

        async def handle(call: StreamCall) -> None:
            await _take_first(call)
            assert self._refusal is not None
            self.fail(call, self._refusal)

        return Streaming(handle)

    def unary(
        self,
        answer: Callable[[RequestT, Call], Answer[ReplyT]],
        request_type: type[RequestT],
    ) -> Unary:
        """Return a method with one request and one reply."""
        telemetry = self.telemetry
        count, now_ns = telemetry.counts.of_request(request_type), telemetry.now_ns
        add_us, slow_ns, by_chance = count.durations_us.add, telemetry.slow_ns, telemetry.by_chance
        in_progress, calls_max = self._in_progress, self._calls_max
        guarding, guard = self._guarding, self._guarding.guard

        def handle(call: ServerCall, data: bytes) -> None:  # calls as few functions as it can
            began_ns = now_ns()
            try:
                if self._refusal is not None or len(in_progress) >= calls_max:
                    self._admit()
                context = guarding.context(call)
                try:
                    request = request_type.FromString(data)
                except DecodeError:
                    request = _parsed(request_type, data)  # raises what the client gets
                if type(context) is not Call or (
                    by_chance is not None
                    and (
                        by_chance()
                        if (parent := context.names.parent) is None
                        else parent.is_sampled
                    )
                ):
                    self._answer_noted(call, count, answer, request, context, began_ns, len(data))
                    return
                if guard is None or guard.is_open:
                    reply = answer(request, context)
                else:
                    reply = guarding.answer(call, answer, request, context, len(data))
                if type(reply) is bytes:
                    call.reply(reply)
                elif isinstance(reply, (bytes, Message)):
                    call.reply(serialized(reply))
                else:
                    WaitingCall(self, call, count, began_ns, context).wait_for(reply, request)
                    return
                ended_ns = now_ns()
                add_us((ended_ns - began_ns) // NS_PER_US)
                if ended_ns - began_ns > slow_ns:
                    noted = NotedCall(count.method, began_ns, context, request)
                    telemetry.end(noted, ended_ns, StatusCode.OK)
            except Exception as error:  # noqa: BLE001 - a bug in one call must not end others
                count.fail(now_ns() - began_ns, code_of(error))
                self.fail(call, error)

        return Unary(handle, None if guard is None else partial(self._check, request_type))

    def _check(self, request_type: type[Message], call: ServerCall) -> None:
        """Refuse a call whose request is still to come, if its caller may send none."""
        try:
            self._guarding.check(call, request_type(), lambda error: self.fail(call, error))
        except ShaleError as error:
            self.fail(call, error)

    def _answer_noted(
        self,
        call: ServerCall,
        count: MethodCount,
        answer: Callable[[RequestT, Call], Answer[ReplyT]],
        request: RequestT,
        context: Call | Awaitable[Call],
        began_ns: int,
        size_bytes: int,
    ) -> None:
        """Answer a call that is noted from its beginning: it is traced, or who calls is unknown."""
        telemetry, noted = self.telemetry, NotedCall.of(count.method, began_ns, call, context)
        if isinstance(context, Call) or telemetry.samples(call.names.parent):
            telemetry.begin_traced(noted, request, call)
        context = noted.call if isinstance(context, Call) else noted.identified(context)
        try:
            work = partial(self._guarding.answer, call, answer, request, context, size_bytes)
            reply = noted.run(work)
            if isinstance(reply, (bytes, Message)):
                call.reply(serialized(reply))
                ended_ns = telemetry.now_ns()
                count.add(ended_ns - began_ns)
                telemetry.end(noted, ended_ns, StatusCode.OK)
            else:
                WaitingCall(self, call, count, began_ns, noted.call, noted).wait_for(reply, request)
        except Exception as error:  # noqa: BLE001 - a bug in one call must not end others
            ended_ns, code = telemetry.now_ns(), code_of(error)
            count.fail(ended_ns - began_ns, code)
            telemetry.end(noted, ended_ns, code)
            self.fail(call, error, noted.call)

    def unary_stream(
        self,
        answer: Callable[[RequestT, Call], AsyncIterator[ReplyT]],
        request_type: type[RequestT],
    ) -> Streaming:
        """Return a method with one request and a stream of replies."""
        method = method_of(request_type)

        async def serve(call: StreamCall, context: Call) -> None:
            data = await call.read()
            if data is None:
                raise InvalidRequest("request", "the call has none")
            request = _parsed(request_type, data)
            assert context.end is not None
            permitted = self._guarding.permitted(call, context, request, len(data), context.end)
            with permitted as permit, self._noted_stream(call, method, context, request) as noted:
                replies = answer(request, noted.noted.call)
                try:
                    async for reply in replies:
                        noted.pause()
                        await self._write(call, serialized(reply), permit)
                        noted.go_on()
                finally:
                    await close_replies(replies)

        return self.stream(serve, request_type)

    def session(self, service: KvService, limits: LimitSettings) -> Streaming:
        """Return `KV.Session`."""

        async def serve(call: StreamCall, context: Call) -> None:
            session = Session(
                service,
                limits,
                context,
                budget=self._session_budget,
                describe=self._operation_error,
                telemetry=self.telemetry,
                now_ms=self._runtime.clock.monotonic_ms,
                guard=self._guarding.guard,
            )
            await self._run_guarded(session, SessionRequest, call, context)

        return self.stream(serve, SessionRequest)

    def watch(self, watches: WatchService) -> Streaming:
        """Return `KV.Watch`."""

        async def serve(call: StreamCall, context: Call) -> None:
            admit = self._guarding.admit_watch(context)
            describe = partial(self._operation_error, call=context)
            stream = watches.open(describe, admit, principal=context.principal)
            try:
                await self._run_guarded(stream, WatchRequest, call, context)
            finally:
                await self._run_to_end(stream.leave())

        return self.stream(serve, WatchRequest, delays_idle=False)

    def conversation(
        self, serve: Callable[[StreamCall], Awaitable[None]], request_type: type[Message]
    ) -> Streaming:
        """Return a method that is allowed or refused as a whole, before its first request."""

        async def serve_if_allowed(call: StreamCall, context: Call) -> None:
            assert context.end is not None
            with ExitStack() as stack:
                permitted = self._guarding.permitted(call, context, request_type(), 0, context.end)
                try:
                    stack.enter_context(permitted)
                except ShaleError:
                    await _take_first(call)
                    raise
                await serve(call)

        return self.stream(serve_if_allowed, request_type)

    def duplex(
        self, open_stream: Callable[[], DuplexStream], request_type: type[Message]
    ) -> Streaming:
        """Return the method of a bidirectional stream, for which `idle` does not wait."""

        async def serve(call: StreamCall, _: Call) -> None:
            call.is_admitted = True
            await self._run_duplex(open_stream(), _requests(request_type, call), call)

        return self.stream(serve, request_type, delays_idle=False)

    def stream(
        self,
        serve: Callable[[StreamCall, Call], Awaitable[None]],
        request_type: type[Message],
        *,
        delays_idle: bool = True,
    ) -> Streaming:
        """Return a method whose messages `serve` reads and writes.

        Its call ends when `serve` returns, or with the error that it raises. With `delays_idle`,
        `idle` waits for that.
        """
        count = self.counts.of_request(request_type)

        async def handle(call: StreamCall) -> None:
            running = RunningStream(call.peer)
            if call.names is not UNNAMED:  # in this task, and in those of its operations
                bind_contextvars(**named(call.names.request_id, call.names.trace_id))
            try:
                with TimedCall(count, self.counts.now_ns, call.deadline_s):
                    context = await self._admit_stream(call, running)
                    with self._running(running, delays_idle=delays_idle):
                        await serve(call, context)
                call.end()
            except asyncio.CancelledError as cancelled:
                if running.is_cancelled_by_client:
                    forget_frames(cancelled)
                    raise
                self.fail(call, running.take_end() or cancelled)
                if isinstance(running.ended_by, StreamTooSlow):
                    # Those who read on get the error, and all others make space.
                    loop = asyncio.get_running_loop()
                    loop.call_later(self._stalled_ms / 1_000, call.reset)
            except Exception as error:  # noqa: BLE001 - a bug in one call must not end others
                self.fail(call, error)

        return Streaming(handle)

    async def _run_guarded(
        self, stream: DuplexStream, request_type: type[Message], call: StreamCall, context: Call
    ) -> None:
        """Run a stream whose requests the guard is asked about one by one, if it may be opened."""
        requests = _requests(request_type, call)
        with ExitStack() as stack:
            permitted = self._guarding.permitted(call, context, request_type(), 0, stream.refuse)
            try:
                permit = stack.enter_context(permitted)
            except ShaleError:
                stream.close()
                await _take_first(call)
                raise
            if request_type is SessionRequest:
                permit = None  # each operation counts its own reply
            await self._run_duplex(stream, requests, call, permit)

    async def _write(self, call: StreamCall, message: bytes, permit: Permit | None) -> None:
        """Write a message of a stream, and make the pause that the quota of its client demands."""
        await call.write(message)
        if permit is not None and (pause_ms := permit.reply(len(message))):
            await self._runtime.clock.sleep_ms(pause_ms)

    async def _run_duplex(
        self,
        stream: DuplexStream,
        requests: AsyncIterator[Message],
        call: StreamCall,
        permit: Permit | None = None,
    ) -> None:
        ended_by: ShaleError | CallFailed | None = None
        self._streams.add(stream)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(_read(stream, requests, tasks))
                try:
                    async for reply in stream.replies():
                        await self._write(call, serialized(reply), permit)
                except (ShaleError, CallFailed) as error:  # the group would wrap it
                    ended_by = error
                finally:
                    reader.cancel()
                    stream.close()
        finally:
            self._streams.discard(stream)
        if ended_by is not None:
            raise ended_by

    async def _run_to_end(self, work: Coroutine[None, None, None]) -> None:
        """Run `work`, which goes on when the call is cancelled: clients may disconnect at once."""
        task = asyncio.create_task(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    def begin(self, running: InProgress, *, delays_idle: bool = True) -> None:
        """Note that a call is in progress."""
        self._in_progress.add(running)
        if delays_idle:
            if not self._idle_delays:
                self._idle.clear()
            self._idle_delays += 1

    def ended(self, running: InProgress, *, delays_idle: bool = True) -> None:
        """Note that the call of `begin` is not in progress any more."""
        self._in_progress.discard(running)
        self._idle_delays -= delays_idle
        if not self._idle_delays:
            self._idle.set()

    @contextmanager
    def _noted_stream(
        self, call: StreamCall, method: str, context: Call, request: Message
    ) -> Iterator[NotedStream]:
        """Note a stream of replies while entered, in the task of its call."""
        telemetry, code = self.telemetry, StatusCode.OK
        noted = NotedCall(method, telemetry.now_ns(), context)
        if telemetry.samples(call.names.parent):
            telemetry.begin_traced(noted, request, call)
        noted.request = request
        noted.begin_here()
        stream = NotedStream(noted, telemetry.now_ns)
        try:
            yield stream
        except BaseException as error:
            code = code_of(error, call.deadline_s)
            raise
        finally:
            telemetry.end_stream(stream, code)

    @contextmanager
    def _running(self, stream: RunningStream, *, delays_idle: bool) -> Iterator[None]:
        self.begin(stream, delays_idle=delays_idle)
        try:
            yield
        finally:
            stream.is_running = False
            self.ended(stream, delays_idle=delays_idle)

    def _admit(self) -> None:
        raise_if(self._refusal)
        if len(self._in_progress) >= self._calls_max:
            message = f"{len(self._in_progress)} calls are in progress, and no more are allowed"
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)

    async def _admit_stream(self, call: StreamCall, running: RunningStream) -> Call:
        try:
            self._admit()
            context = self._guarding.context(call, running.end)
            if not isinstance(context, Call):
                context = await context
                self._admit()  # again: nobody ends what begins after `refuse` and `cut_off`
            return context
        except ShaleError:
            await _take_first(call)
            raise

    def fail(self, call: ServerCall, error: BaseException, context: Call | None = None) -> None:
        """End a call with the status of `error`; drops the tracebacks of the error.

        Log lines have the names of the call, or of its `context`, which knows of a trace of ours.
        """
        if isinstance(error, CallFailed):  # it is over, or the error says how it has to end
            forget_frames(error)
            call.end(error.code, error.message)
            return
        names = call.names if context is None else context
        status = self._status_of(error, "a call", named(names.request_id, names.trace_id))
        call.end(StatusCode(status.code), status.message, status.SerializeToString())

    def _operation_error(self, error: BaseException, call: Call) -> kv_pb2.OperationError:
        """Convert the error of an operation of a session or watch; drops its tracebacks."""
        names = named(call.request_id, call.trace_id)
        return operation_error(self._status_of(error, "an operation", names), names)

    def _status_of(
        self, error: BaseException, what: str, names: Mapping[str, str]
    ) -> status_pb2.Status:
        if isinstance(error, ShaleError):
            self.counts.refusals[error.reason] += 1
            status = status_of(error, error_id=self._logged_id(error, names))
        else:
            error_id = self._error_id()
            told = f"unexpected error in {what}"
            _log.error(told, error_id=error_id, exc_info=error, **names)
            status = status_of_bug(error_id)
        forget_frames(error)
        return status

    def _logged_id(self, error: ShaleError, names: Mapping[str, str]) -> str:
        """Log `error` if its row in `rpc.status` says so; returns the id of the line, or ""."""
        if not row_of(type(error)).log:
            return ""
        error_id = self._error_id()
        told = {"error_id": error_id, "reason": error.reason, "problem": str(error)}
        _log.error("call failed", **told, **names)
        return error_id

    def _error_id(self) -> str:
        return f"{self._runtime.random.getrandbits(48):012x}"


def _parsed(request_type: type[RequestT], data: bytes) -> RequestT:
    try:
        return request_type.FromString(data)
    except DecodeError:
        name = request_type.DESCRIPTOR.full_name
        raise InvalidRequest("request", f"the bytes are not a {name}") from None


async def _read(
    stream: DuplexStream, requests: AsyncIterator[Message], tasks: asyncio.TaskGroup
) -> None:
    """Read the requests. A call that is over is no error here: its handler is cancelled."""
    with suppress(CallFailed):
        await stream.read(requests, tasks)


async def _take_first(call: StreamCall) -> None:
    """Take the first message of a stream that will be refused, if it comes soon.

    Clients of grpc.aio lose the status of a stream that ends while they send.
    """
    with suppress(TimeoutError, CallFailed):
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await call.read()


async def _requests(request_type: type[RequestT], call: StreamCall) -> AsyncIterator[RequestT]:
    try:
        while (data := await call.read()) is not None:
            yield _parsed(request_type, data)
    except CallFailed:  # the client has gone, and whoever reads is being cancelled
        raise asyncio.CancelledError from None
