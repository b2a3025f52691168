"""`KV.Session`: many operations on one stream, each answered as soon as it commits.

A message costs a hundred times as much as an operation, so results that are ready together are
sent together. A result is encoded once, when it is ready, to the bytes that protobuf makes of it.
Reading stops while unanswered operations and results that the client has not read hold more than
`session_bytes_max` bytes, overhead included, or while all sessions together hold more than
`sessions_bytes_max`. In the latter case sessions whose clients read nothing are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

from google.protobuf.message import Message

from shalekv.concurrency import FifoLock
from shalekv.errors import InvalidRequest, ShaleError, StreamTooSlow, raise_if
from shalekv.format.coding import varint
from shalekv.read.memory_budget import SMALL_BYTES, MemoryBudget, Stream
from shalekv.rpc.call_counts import NS_PER_US, MethodCount, code_of
from shalekv.rpc.call_telemetry import CallTelemetry, NotedCall
from shalekv.rpc.guarding import answer_guarded
from shalekv.server.access.guard import Guard
from shalekv.server.service import Answer, Call, KvService
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2
from shalekv.write.pending_replies import PendingReply
from shalekv_wire.status import StatusCode
from shalekv_wire.trace_context import CallNames, call_names

TURN_COUNT = 128  # operations begun between two chances for other tasks: some milliseconds
# Memory of an unanswered operation and of an unread result beside their bytes, measured. The log
# accounts for its own memory of a write.
OPERATION_OVERHEAD_BYTES = 1_000
RESULT_OVERHEAD_BYTES = 100
_RESULTS_TAG, _ID_TAG = b"\x0a", b"\x08"  # of a result in a reply, and of the id in a result
KINDS = ("get", "batch_get", "put", "delete", "delete_range", "write", "txn")
Describe: TypeAlias = Callable[[BaseException, Call], kv_pb2.OperationError]
_Method: TypeAlias = Callable[[Any, Call], Answer[Any]]
_Outcome: TypeAlias = Message | bytes | BaseException
_Pending: TypeAlias = asyncio.Future[Any] | PendingReply[Any]


class _Kind:
    """One kind of operation: how it is answered and counted, and how its result is encoded."""

    __slots__ = ("add_us", "answer", "calls", "tag")

    def __init__(self, name: str, answer: _Method, calls: MethodCount) -> None:
        self.answer = answer
        self.calls = calls
        self.add_us = calls.durations_us.add
        self.tag = _tag_of(name)  # of the reply in a result


class _Calls:
    """The contexts of the operations of one session. Those with the same deadline share one."""

    def __init__(self, undated: Call, now_ms: Callable[[], float]) -> None:
        """`undated` is that of operations without a deadline; `now_ms` is the clock of others."""
        self.undated = undated
        self._now_ms = now_ms
        self._arrived_ms: float | None = None
        self._dated: dict[int, Call] = {}  # by time-out

    def arrived(self) -> None:
        """Note that a message has arrived, from which the time of its operations counts."""
        self._arrived_ms = None
        self._dated.clear()

    def within(self, timeout_ms: int) -> Call:
        """Return the context of an operation of the last message, with this time."""
        call = self._dated.get(timeout_ms)
        if call is None:
            if self._arrived_ms is None:
                self._arrived_ms = self._now_ms()
            deadline_ms = self._arrived_ms + timeout_ms
            call = replace(self.undated, deadline_ms=deadline_ms)
            self._dated[timeout_ms] = call
        return call


class HeldMemory:
    """The memory of one session: of its unanswered operations and unread results."""

    def __init__(self, bytes_max: int, budget: MemoryBudget) -> None:
        """Reading stops beyond `bytes_max`, or when all sessions together use up `budget`."""
        self.held_bytes = 0
        self.budget = budget
        self.is_closed = False
        self._bytes_max = bytes_max
        self._freed = asyncio.Event()

    @property
    def may_read(self) -> bool:
        """Return whether one more operation may be begun."""
        held_bytes = self.held_bytes
        if held_bytes > self._bytes_max:
            return False
        # If other sessions use up the budget, this one continues, one operation after the other.
        return held_bytes <= SMALL_BYTES or self.budget.free_bytes > 0

    def hold(self, more_bytes: int) -> None:
        """Hold `more_bytes` more, or give them back if negative; no effect after `close`."""
        if not self.is_closed:
            self.held_bytes += more_bytes
            self.budget.count(more_bytes)

    def taken(self, size_bytes: int) -> None:
        """Give back the bytes of results that the transport has taken; reading may go on."""
        self.hold(-size_bytes)
        self._freed.set()

    def close(self) -> None:
        """Give back everything, for good."""
        self.hold(-self.held_bytes)
        self.is_closed = True

    async def wait(self, stream: Stream) -> None:
        """Wait until results were taken; if other sessions use up the budget, end a stalled one."""
        self._freed.clear()
        stalls = self.budget.stalls
        is_own = self.held_bytes > self._bytes_max
        if stalls is None or is_own or stalls.is_untaken(stream):
            await self._freed.wait()  # which is up to the client of this session
        elif not await stalls.end_oldest():
            with suppress(TimeoutError):
                async with asyncio.timeout(stalls.end_interval_ms / 1_000):
                    await self._freed.wait()


class ResultQueue:
    """The results that were not sent yet, encoded, in the order in which they became ready."""

    def __init__(self, memory: HeldMemory) -> None:
        """Begin without results."""
        self.changed = asyncio.Event()  # there is a result, or the stream may have ended
        self._memory = memory
        self._ready: list[bytes] = []  # each a part of a message
        self._ready_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, operation_id: int, tag: bytes, reply: bytes, *, given_bytes: int = 0) -> None:
        """Add a result at the end; its operation gives back `given_bytes`."""
        field = tag + varint(len(reply))
        head = _ID_TAG + varint(operation_id) if operation_id else b""
        size_bytes = len(head) + len(field) + len(reply)
        result = b"".join((_RESULTS_TAG, varint(size_bytes), head, field, reply))
        size_bytes = len(result)
        self._ready.append(result)
        self._ready_bytes += size_bytes
        self._memory.hold(size_bytes + RESULT_OVERHEAD_BYTES - given_bytes)
        self.changed.set()

    def take(self) -> tuple[bytes, int]:
        """Take the results for one message, at least one, and the bytes that they hold."""
        ready, size_bytes = self._ready, self._ready_bytes
        count = len(ready)
        if size_bytes > STREAM_MESSAGE_BYTES_MAX:
            count = size_bytes = 0
            for result in ready:
                if count and size_bytes + len(result) > STREAM_MESSAGE_BYTES_MAX:
                    break
                size_bytes += len(result)
                count += 1
        reply = b"".join(ready[:count])
        del ready[:count]
        self._ready_bytes -= size_bytes
        return reply, size_bytes + count * RESULT_OVERHEAD_BYTES

    def clear(self) -> None:
        """Drop all results."""
        self._ready.clear()
        self._ready_bytes = 0


class Session:
    """The operations of one stream."""

    def __init__(
        self,
        service: KvService,
        limits: LimitSettings,
        call: Call,
        *,
        budget: MemoryBudget | None = None,
        describe: Describe,
        telemetry: CallTelemetry,
        now_ms: Callable[[], float],
        guard: Guard | None = None,
    ) -> None:
        """Create a session on `service`.

        `describe` converts the exception of an operation to the error that the client gets.
        `now_ms` is the clock of deadlines. All sessions of a server share `budget`. The guard is
        asked before each operation; None: all are allowed.
        """
        self._limits = limits
        self._memory = HeldMemory(
            limits.session_bytes_max, budget or MemoryBudget(limits.sessions_bytes_max)
        )
        self._calls = _Calls(replace(call, deadline_ms=None, write_order=FifoLock()), now_ms)
        self._guard = guard
        self._describe = describe
        self._kinds = {
            kind: _Kind(kind, getattr(service, kind), telemetry.counts.of(f"Session.{kind}"))
            for kind in KINDS
        }
        self._telemetry = telemetry
        # The replies, futures or tasks of the unanswered operations.
        self._waiting: dict[int, _Pending] = {}
        self._results = ResultQueue(self._memory)
        self._is_read = False  # all requests were read
        self._refusal: ShaleError | None = None
        self._failure: ShaleError | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of unanswered operations and unread results, overhead included."""
        return self._memory.held_bytes

    async def read(
        self, requests: AsyncIterator[kv_pb2.SessionRequest], tasks: asyncio.TaskGroup
    ) -> None:
        """Begin all operations in their order, no faster than memory allows.

        Operations that need a task get one of `tasks`. An invalid message ends the stream after all
        operations before it are answered: `replies` raises the error.
        """
        try:
            async for request in requests:
                self._calls.arrived()
                self._check(request)
                caller = self._calls.undated.principal
                self._telemetry.counts.by_principal.add(caller, len(request.operations))
                for index, operation in enumerate(request.operations):
                    # A new task must take its place in the write order before the next operation
                    # does. And a long message must not delay other tasks.
                    has_task = self._begin(operation, index, tasks)
                    if has_task or index % TURN_COUNT == TURN_COUNT - 1:
                        await asyncio.sleep(0)
                    while not self._memory.may_read:
                        await self._memory.wait(self)
            self._is_read = True
        except ShaleError as error:
            self._failure = error
        self._results.changed.set()

    def _check(self, request: kv_pb2.SessionRequest) -> None:
        count = len(request.operations)
        if not count:
            raise InvalidRequest("operations", "at least one is needed")
        if count > self._limits.batch_count_max:
            problem = f"{count} of them, and batch_count_max is {self._limits.batch_count_max}"
            raise InvalidRequest("operations", problem)

    async def replies(self) -> AsyncIterator[bytes]:
        """Yield results as they become ready, until the stream has ended and all are sent.

        Each is a `SessionReply`, encoded.
        """
        stalls, results = self._memory.budget.stalls, self._results
        while True:
            results.changed.clear()
            if results:
                reply, held_bytes = results.take()
                if stalls is not None:
                    stalls.offer(self, held_bytes)
                yield reply
                if stalls is not None:
                    stalls.taken(self)
                self._memory.taken(held_bytes)
                continue
            if not self._waiting:
                if self._failure is not None:
                    raise self._failure
                raise_if(self._refusal)
                if self._is_read:
                    return
            await results.changed.wait()

    def refuse(self, error: ShaleError) -> None:
        """Refuse new operations; the stream ends with `error` when all others are answered."""
        self._refusal = error
        self._results.changed.set()

    def close(self) -> None:
        """Release everything, because the client has gone; cancels operations that still wait."""
        self._memory.close()
        self._results.clear()
        unanswered = [*self._waiting.values()]
        self._waiting.clear()
        if self._memory.budget.stalls is not None:
            self._memory.budget.stalls.taken(self)
        for future in unanswered:
            future.cancel()

    async def end(self, error: StreamTooSlow) -> None:
        """Implement `Stream`."""
        self.close()
        self.refuse(error)
        if self._calls.undated.end is not None:
            self._calls.undated.end(error)

    def _begin(
        self, operation: kv_pb2.SessionOperation, index: int, tasks: asyncio.TaskGroup
    ) -> bool:
        """Begin an operation; returns True if it has a new task, which has not run yet."""
        telemetry, operation_id = self._telemetry, operation.id
        name: str = operation.WhichOneof("operation") or ""
        kind = self._kinds.get(name)
        began_ns = telemetry.now_ns()
        context = self._calls.undated
        call: Call | NotedCall = context
        try:
            timeout_ms = operation.timeout_ms
            if timeout_ms or operation.traceparent or operation.request_id:
                call = context = self._call_of(operation, timeout_ms)
            if kind is None or operation_id in self._waiting or self._refusal is not None:
                self._refuse(operation_id, index)
            assert kind is not None
            request = getattr(operation, name)
            if telemetry.tracer is not None and telemetry.samples(context.names.parent):
                call = NotedCall(kind.calls.method, began_ns, context)
                answer = self._answer_traced(call, kind, request)
            elif self._guard is None or self._guard.is_open:
                answer = kind.answer(request, context)
            else:
                size_bytes = request.ByteSize()
                answer = answer_guarded(self._guard, kind.answer, request, context, size_bytes)
        except Exception as error:  # noqa: BLE001 - one operation must not end the others
            self._fail(operation_id, kind, began_ns, 0, call, error)
            return False
        if type(answer) is bytes or (
            not isinstance(answer, PendingReply) and isinstance(answer, Message)
        ):
            self._answer(operation_id, kind, began_ns, 0, call, answer)
            return False
        size_bytes = operation.ByteSize() + OPERATION_OVERHEAD_BYTES
        self._memory.hold(size_bytes)
        if isinstance(answer, PendingReply):
            self._waiting[operation_id] = answer
            done = partial(self._replied, operation_id, kind, began_ns, size_bytes, call)
            answer.add_done_callback(done)
            return False
        future: asyncio.Future[Any]
        if isinstance(answer, asyncio.Future):
            future = answer
        else:
            call = _noted(call, kind, began_ns, request)
            future = tasks.create_task(_outcome(answer), context=call.enter())
            if isinstance(answer, Coroutine):  # closed even if its task is cancelled before it runs
                future.add_done_callback(lambda _: answer.close())
        self._waiting[operation_id] = future
        done = partial(self._done, operation_id, kind, began_ns, size_bytes, call)
        future.add_done_callback(done)
        return future is not answer

    def _answer_traced(self, noted: NotedCall, kind: _Kind, request: Message) -> Answer[Any]:
        """Answer an operation that is traced from its beginning."""
        self._telemetry.begin_traced(noted, request, None)
        answer, call = kind.answer, noted.call
        if self._guard is None:
            return noted.run(partial(answer, request, call))
        size_bytes = request.ByteSize()
        return noted.run(partial(answer_guarded, self._guard, answer, request, call, size_bytes))

    def _refuse(self, operation_id: int, index: int) -> NoReturn:
        """Raise why an operation is not begun."""
        if operation_id in self._waiting:
            problem = f"{operation_id} belongs to an operation that is not answered yet"
            raise InvalidRequest(f"operations[{index}].id", problem)
        raise_if(self._refusal)
        raise InvalidRequest(f"operations[{index}]", "no operation is set")

    def _call_of(self, operation: kv_pb2.SessionOperation, timeout_ms: int) -> Call:
        """Return the context of an operation that has a time-out or names of its own."""
        call = self._calls.within(timeout_ms) if timeout_ms else self._calls.undated
        if operation.traceparent or operation.request_id:
            call = _with_names(call, operation)
        return call

    def _replied(
        self,
        operation_id: int,
        kind: _Kind,
        began_ns: int,
        size_bytes: int,
        call: Call | NotedCall,
        reply: PendingReply[Any],
    ) -> None:
        outcome = reply.outcome
        assert outcome is not None
        self._waiting.pop(operation_id, None)
        if type(outcome) is bytes:
            self._answer(operation_id, kind, began_ns, size_bytes, call, outcome, reply)
        else:
            assert isinstance(outcome, BaseException)
            self._fail(operation_id, kind, began_ns, size_bytes, call, outcome, reply)

    def _done(
        self,
        operation_id: int,
        kind: _Kind,
        began_ns: int,
        size_bytes: int,
        call: Call | NotedCall,
        future: asyncio.Future[Any],
    ) -> None:
        self._waiting.pop(operation_id, None)
        outcome = _outcome_of(future)
        if isinstance(outcome, BaseException):
            self._fail(operation_id, kind, began_ns, size_bytes, call, outcome)
        else:
            self._answer(operation_id, kind, began_ns, size_bytes, call, outcome)

    def _answer(
        self,
        operation_id: int,
        kind: _Kind,
        began_ns: int,
        size_bytes: int,
        call: Call | NotedCall,
        answer: Message | bytes,
        reply: PendingReply[Any] | None = None,
    ) -> None:
        """Count an operation that has ended, and add its result, unless the client has gone.

        It has held `size_bytes`.
        """
        telemetry = self._telemetry
        ended_ns = telemetry.now_ns()
        kind.add_us((ended_ns - began_ns) // NS_PER_US)
        if ended_ns - began_ns > telemetry.slow_ns or type(call) is NotedCall:
            telemetry.end(_noted(call, kind, began_ns), ended_ns, StatusCode.OK, reply)
        if not self._memory.is_closed:
            data = answer if isinstance(answer, bytes) else answer.SerializeToString()
            self._results.add(operation_id, kind.tag, data, given_bytes=size_bytes)

    def _fail(
        self,
        operation_id: int,
        kind: _Kind | None,
        began_ns: int,
        size_bytes: int,
        call: Call | NotedCall,
        error: BaseException,
        reply: PendingReply[Any] | None = None,
    ) -> None:
        """Do the same for one that has failed. An operation of no known kind is not counted."""
        telemetry = self._telemetry
        if kind is not None:
            ended_ns, code = telemetry.now_ns(), code_of(error)
            kind.calls.fail(ended_ns - began_ns, code)
            if ended_ns - began_ns > telemetry.slow_ns or isinstance(call, NotedCall):
                telemetry.end(_noted(call, kind, began_ns), ended_ns, code, reply)
        if not self._memory.is_closed:
            context = call.call if isinstance(call, NotedCall) else call
            data = self._describe(error, context).SerializeToString()
            self._results.add(operation_id, _ERROR_TAG, data, given_bytes=size_bytes)


def _noted(
    call: Call | NotedCall, kind: _Kind, began_ns: int, request: Message | None = None
) -> NotedCall:
    if isinstance(call, NotedCall):
        return call
    return NotedCall(kind.calls.method, began_ns, call, request)


def _with_names(call: Call, operation: kv_pb2.SessionOperation) -> Call:
    """Return the context of an operation with names of its own; `call` has those of the session."""
    own, of_session = call_names(operation.request_id, operation.traceparent), call.names
    names = CallNames(own.request_id or of_session.request_id, own.parent or of_session.parent)
    return replace(call, names=names)


def _tag_of(field: str) -> bytes:
    """Return the tag of a field of a result, all of which have a length."""
    number = kv_pb2.SessionResult.DESCRIPTOR.fields_by_name[field].number
    return varint(number << 3 | 2)


_ERROR_TAG = _tag_of("error")


async def _outcome(answer: Awaitable[Message | bytes]) -> _Outcome:
    """Await an answer, and return its error as a value: a task that fails would end its group."""
    try:
        return await answer
    except Exception as error:  # noqa: BLE001 - one operation must not end the others
        return error


def _outcome_of(future: asyncio.Future[Any]) -> _Outcome:
    """Return the result or error of a future that is done."""
    if future.cancelled():
        return asyncio.CancelledError()
    return future.exception() or future.result()
