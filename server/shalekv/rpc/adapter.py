"""Adapter from gRPC calls to services: one kind of handler for each shape of call.

Requests are parsed here and not by grpc, which would answer malformed bytes with the text of a
Python exception. Handlers are coroutine functions, since grpc.aio runs others in threads, and
streams are written with `context.write`, since grpc.aio leaves the generator of a cancelled
stream open until it is garbage collected.

A call that fails ends with a status. The status is sent after the messages that were written
before; if the client does not read those, gRPC holds both until the client reads, cancels the call,
or its connection ends. So a stream whose client reads nothing is ended by a reset. grpc.aio cannot
reset a stream: it does so when nothing refers to the call any more, which its own task for the call
prevents; see `_reset`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from grpc_status import rpc_status

from shalekv.errors import (
    DeadlinePassed,
    InvalidRequest,
    OutcomeUnknown,
    Overloaded,
    ShaleError,
    StreamTooSlow,
    raise_if,
)
from shalekv.read.memory_budget import MemoryBudget
from shalekv.rpc.call_counts import CallCounts, MethodCount, TimedCall
from shalekv.rpc.session import Session
from shalekv.rpc.status import operation_error, row_of, status_of, status_of_bug
from shalekv.runtime import Runtime
from shalekv.server.service import Answer, Call, DuplexStream, KvService, WatchService
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message | bytes)
SessionRequest = kv_pb2.SessionRequest
WatchRequest = kv_pb2.WatchRequest

# Name of the coroutine that grpc.aio runs beside the handler of a call, until its client has gone.
WATCHING = "_schedule_rpc_coro"
# Advice with `Overloaded`: more calls than allowed are a burst, and some of them end by then.
RETRY_AFTER_MS = 100
CUT_OFF = "this server ceased to be the writer before the call had ended"

_log = structlog.get_logger(__name__)


class SwitchableHandler(grpc.GenericRpcHandler):
    """Methods that can be exchanged while the server listens; grpc itself takes them only once.

    A call that has begun keeps its handler.
    """

    def __init__(self) -> None:
        """Begin without methods."""
        self._current: Sequence[grpc.GenericRpcHandler] = ()

    def switch_to(self, *methods: grpc.GenericRpcHandler) -> None:
        """Handle calls with these methods from now on."""
        self._current = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a call; None: the method is unknown."""
        found = (each.service(handler_call_details) for each in self._current)
        return next((handler for handler in found if handler is not None), None)


class SingleHandler(grpc.GenericRpcHandler):
    """One handler for all methods of some services."""

    def __init__(self, services: Sequence[str], handler: Handler) -> None:
        """`services` are full names."""
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._handler = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler if the method belongs to one of the services."""
        is_ours = handler_call_details.method.startswith(self._prefixes)
        return self._handler if is_ours else None


async def end(
    context: Context, status: status_pb2.Status, *, within_ms: float | None = None
) -> None:
    """End the call with `status`, unless the client has gone. Must be the last action of a handler.

    If the client has not read the status `within_ms`, the stream is reset: the client gets a bare
    CANCELLED, and gRPC frees what was not sent. None: no timeout. grpc.aio refuses a status behind
    a first message that was not sent yet; then the stream is reset at once.

    grpc keeps the error of `abort` in the context, and raises it again when the handler has
    returned. It must not refer to frames, since those refer to the context.
    """
    try:
        async with asyncio.timeout(None if within_ms is None else within_ms / 1_000):
            await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.AbortError as aborted:
        forget_frames(aborted)
    except grpc.aio.BaseError as gone:  # the deadline has passed, or the connection is lost
        if within_ms is not None:
            _reset()
        raise asyncio.CancelledError from gone
    except TimeoutError:
        _reset()
        raise asyncio.CancelledError from None  # and grpc adds nothing


def forget_frames(error: BaseException) -> None:
    """Drop the traceback of an error, and of each error in its chain of causes and contexts.

    A frame that waited for a future refers to the future, which refers to its error, which refers
    to the frame: a cycle that only a garbage collection would free. grpc and task groups make
    similar ones.
    """
    errors = [error]
    for each in errors:
        each.__traceback__ = None
        chained = (each.__cause__, each.__context__)
        errors += [other for other in chained if other is not None and other not in errors]


def _reset() -> None:
    """Reset the stream of the running handler, by cancelling the task of grpc.aio that holds it.

    Nothing happens if this version of grpc.aio has no task with this name.
    """
    handler = asyncio.current_task()
    for task in asyncio.all_tasks():
        running = cast("Coroutine[Any, Any, Any]", task.get_coro())
        if getattr(running, "__name__", "") == WATCHING and any(
            any(each is handler for each in gc.get_referents(scope))
            for scope in gc.get_referents(running)
        ):
            task.cancel()


class Adapter:
    """Makes method handlers from services, limits the calls in progress, and refuses calls."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        calls_max: int,
        limits: LimitSettings | None = None,
        session_budget: MemoryBudget | None = None,
    ) -> None:
        """At most `calls_max` calls are in progress; more are refused with `Overloaded`.

        All sessions share `session_budget`.
        """
        limits = limits or LimitSettings()
        self._session_budget = session_budget or MemoryBudget(limits.sessions_bytes_max)
        self._stalled_ms = limits.result_stalled_ms
        self._runtime = runtime
        self.counts = CallCounts()
        self._calls_max = calls_max
        self._refusal: ShaleError | None = None
        self._streams: set[DuplexStream] = set()
        self._cleanups: set[asyncio.Task[None]] = set()  # that run on when their call has ended
        self._in_calls: set[asyncio.Task[Any]] = set()  # one for each call in progress
        # Tasks of calls that were cancelled here, and the error of each.
        self._cut_off: dict[asyncio.Task[Any], ShaleError] = {}
        self._idle_delays = 0  # calls in progress for which `idle` waits
        self._idle = asyncio.Event()
        self._idle.set()

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
        for task in self._in_calls:
            self._cut_off[task] = OutcomeUnknown(CUT_OFF)
            task.cancel()

    async def wait_for_cleanups(self, timeout_s: float) -> None:
        """Wait for the work that watches do at their end. REQUIRES: no calls are in progress."""
        if self._cleanups:
            _, late = await asyncio.wait(self._cleanups, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def refusing_handler(self, services: Sequence[str]) -> grpc.GenericRpcHandler:
        """Return methods of `services` that end each call with the error given to `refuse`.

        gRPC accepts the handler of a bidirectional stream for methods of any shape, since no
        message is read or written.
        """

        async def handle(_messages: AsyncIterator[bytes], context: Context) -> None:
            assert self._refusal is not None
            await end(context, self._call_status(self._refusal))

        handler: Handler = grpc.stream_stream_rpc_method_handler(handle, None, _serialized)
        return SingleHandler(services, handler)

    def unary(
        self,
        answer: Callable[[RequestT, Call], Answer[ReplyT]],
        request_type: type[RequestT],
    ) -> Handler:
        """Return the handler of a method with one request and one reply."""
        count = self.counts.of_request(request_type)

        async def handle(data: bytes, context: Context) -> ReplyT | None:
            try:
                with self._timed(count), self._in_progress():
                    call = self._call(context)
                    reply = answer(_parsed(request_type, data), call)
                    return reply if isinstance(reply, (bytes, Message)) else await reply
            except asyncio.CancelledError as cancelled:
                if self._is_cancelled_by_client():
                    forget_frames(cancelled)
                    raise
                status = self._call_status(cancelled)
            except Exception as error:  # noqa: BLE001 - a bug in one call must not end others
                status = self._call_status(error)
            await end(context, status)
            return None

        return grpc.unary_unary_rpc_method_handler(handle, None, _serialized)

    def unary_stream(
        self,
        answer: Callable[[RequestT, Call], AsyncIterator[ReplyT]],
        request_type: type[RequestT],
    ) -> Handler:
        """Return the handler of a method with one request and a stream of replies."""
        count = self.counts.of_request(request_type)

        async def handle(data: bytes, context: Context) -> None:
            async def serve(call: Call) -> None:
                replies = answer(_parsed(request_type, data), call)
                try:
                    async for reply in replies:
                        await context.write(reply)
                finally:
                    await _close(replies)

            await self._serve_stream(context, serve, count)

        return grpc.unary_stream_rpc_method_handler(handle, None, _serialized)

    def session(self, service: KvService, limits: LimitSettings) -> Handler:
        """Return the handler of `KV.Session`."""
        count = self.counts.of_request(SessionRequest)

        async def handle(messages: AsyncIterator[bytes], context: Context) -> None:
            async def serve(call: Call) -> None:
                session = Session(
                    service,
                    limits,
                    call,
                    budget=self._session_budget,
                    describe=self._operation_error,
                    counts=self.counts,
                    now_ms=self._runtime.clock.monotonic_ms,
                )
                await self._run_duplex(session, _requests(SessionRequest, messages), context)

            await self._serve_stream(context, serve, count)

        return grpc.stream_stream_rpc_method_handler(handle, None, _serialized)

    def watch(self, watches: WatchService) -> Handler:
        """Return the handler of `KV.Watch`."""
        count = self.counts.of_request(WatchRequest)

        async def handle(messages: AsyncIterator[bytes], context: Context) -> None:
            async def serve(_call: Call) -> None:
                stream = watches.open(self._operation_error)
                try:
                    await self._run_duplex(stream, _requests(WatchRequest, messages), context)
                finally:
                    await self._run_to_end(stream.leave())

            await self._serve_stream(context, serve, count, delays_idle=False)

        return grpc.stream_stream_rpc_method_handler(handle, None, _serialized)

    def duplex(
        self, open_stream: Callable[[], DuplexStream], request_type: type[Message]
    ) -> Handler:
        """Return the handler of a bidirectional stream, for which `idle` does not wait."""
        count = self.counts.of_request(request_type)

        async def handle(messages: AsyncIterator[bytes], context: Context) -> None:
            async def serve(_call: Call) -> None:
                await self._run_duplex(open_stream(), _requests(request_type, messages), context)

            await self._serve_stream(context, serve, count, delays_idle=False)

        return grpc.stream_stream_rpc_method_handler(handle, None, _serialized)

    async def _serve_stream(
        self,
        context: Context,
        serve: Callable[[Call], Awaitable[None]],
        count: MethodCount,
        *,
        delays_idle: bool = True,
    ) -> None:
        """Let `serve` write the replies of a stream, and end the call with its error, if any.

        With `delays_idle`, `idle` waits for the end of the stream.
        """
        timed = self._timed(count, is_stream=True)
        within_ms: float | None = None
        try:
            with timed, self._in_progress(delays_idle=delays_idle):
                await serve(self._call(context, self._stream_end(context)))
            return
        except asyncio.CancelledError as cancelled:
            if self._is_cancelled_by_client():
                forget_frames(cancelled)
                raise
            if isinstance(self._cut_off.get(_current_task()), StreamTooSlow):
                within_ms = self._stalled_ms
            status = self._call_status(cancelled)
        except grpc.aio.BaseError as gone:
            forget_frames(gone)
            raise  # the connection is gone: nobody waits for a reply
        except Exception as error:  # noqa: BLE001 - a bug in one call must not end others
            status = self._call_status(error)
        await end(context, status, within_ms=within_ms)

    def _stream_end(self, context: Context) -> Callable[[ShaleError], None]:
        """Return a function that ends this task's stream even while it waits for its client."""
        task, peer = _current_task(), context.peer()

        def end_stream(error: ShaleError) -> None:  # which must not hold the context
            if task in self._in_calls and task not in self._cut_off:
                self._cut_off[task] = error
                task.cancel()
                _log.warning("a stream was ended", peer=peer, problem=str(error))

        return end_stream

    async def _run_duplex(
        self, stream: DuplexStream, requests: AsyncIterator[Message], context: Context
    ) -> None:
        ended_by: ShaleError | grpc.aio.BaseError | None = None
        self._streams.add(stream)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(stream.read(requests, tasks))
                try:
                    async for reply in stream.replies():
                        await context.write(reply)
                except (ShaleError, grpc.aio.BaseError) as error:  # the group would wrap it
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

    def _timed(self, count: MethodCount, *, is_stream: bool = False) -> TimedCall:
        return TimedCall(count, self.counts.now_ns, is_stream=is_stream)

    @contextmanager
    def _in_progress(self, *, delays_idle: bool = True) -> Iterator[None]:
        raise_if(self._refusal)
        if len(self._in_calls) >= self._calls_max:
            message = f"{len(self._in_calls)} calls are in progress, and no more are allowed"
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)
        task = _current_task()
        self._in_calls.add(task)
        self._idle_delays += delays_idle
        if self._idle_delays:
            self._idle.clear()
        try:
            yield
        finally:
            self._in_calls.discard(task)
            self._idle_delays -= delays_idle
            if not self._idle_delays:
                self._idle.set()

    def _call(
        self, context: Context, end_stream: Callable[[ShaleError], None] | None = None
    ) -> Call:
        deadline_ms: float | None = None
        # The stubs leave out that there may be no deadline.
        remaining_s: float | None = context.time_remaining()
        if remaining_s is not None:
            if remaining_s <= 0:
                raise DeadlinePassed("the deadline had passed when the server received the call")
            deadline_ms = self._runtime.clock.monotonic_ms() + remaining_s * 1000.0
        return Call(peer=context.peer(), deadline_ms=deadline_ms, end=end_stream)

    def _is_cancelled_by_client(self) -> bool:
        """Return whether a `CancelledError` in this call means that its client has cancelled it.

        Otherwise the call was cut off here, or a future that it awaited was cancelled, which is a
        bug.
        """
        task = _current_task()
        return task not in self._cut_off and task.cancelling() > 0

    def _call_status(self, error: BaseException) -> status_pb2.Status:
        """Convert the error of this call to a status; drops the tracebacks of the error."""
        task = _current_task()
        cut_off_by = self._cut_off.pop(task, None)
        if isinstance(error, asyncio.CancelledError) and cut_off_by is not None:
            task.uncancel()
            error = cut_off_by
        return self._status_of(error, "a call")

    def _operation_error(self, error: BaseException) -> kv_pb2.OperationError:
        """Convert the error of an operation of a session or watch; drops its tracebacks."""
        return operation_error(self._status_of(error, "an operation"))

    def _status_of(self, error: BaseException, what: str) -> status_pb2.Status:
        if isinstance(error, ShaleError):
            status = status_of(error, error_id=self._logged_id(error))
        else:
            error_id = self._error_id()
            _log.error(f"unexpected error in {what}", error_id=error_id, exc_info=error)
            status = status_of_bug(error_id)
        forget_frames(error)
        return status

    def _logged_id(self, error: ShaleError) -> str:
        """Log `error` if its row in `rpc.status` says so; returns the id of the line, or ""."""
        if not row_of(type(error)).log:
            return ""
        error_id = self._error_id()
        _log.error("call failed", error_id=error_id, reason=error.reason, problem=str(error))
        return error_id

    def _error_id(self) -> str:
        return f"{self._runtime.random.getrandbits(48):012x}"


def _current_task() -> asyncio.Task[Any]:
    return cast("asyncio.Task[Any]", asyncio.current_task())


def _parsed(request_type: type[RequestT], data: bytes) -> RequestT:
    try:
        return request_type.FromString(data)
    except DecodeError:
        name = request_type.DESCRIPTOR.full_name
        raise InvalidRequest("request", f"the bytes are not a {name}") from None


async def _requests(
    request_type: type[RequestT], messages: AsyncIterator[bytes]
) -> AsyncIterator[RequestT]:
    async for data in messages:
        yield _parsed(request_type, data)


def _serialized(reply: Message | bytes) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


async def _close(replies: AsyncIterator[Any]) -> None:
    """Close an async generator at once, to free its view of the data."""
    close = getattr(replies, "aclose", None)
    if close is not None:
        await close()
