"""`KV.Session`: many operations on one stream, each answered as soon as it commits.

A message costs a hundred times as much as an operation, so results that are ready together are sent
together. Reading stops while unanswered operations and results that the client has not read hold
more than `session_bytes_max` bytes, overhead included, or while all sessions together hold more
than `sessions_bytes_max`. In the latter case sessions whose clients read nothing are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.message import Message

from shalekv.concurrency import FifoLock
from shalekv.errors import InvalidRequest, ShaleError, StreamTooSlow, raise_if
from shalekv.read.memory_budget import SMALL_BYTES, MemoryBudget, Stream
from shalekv.rpc.call_counts import CallCounts, MethodCount
from shalekv.server.service import Answer, Call, KvService
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2
from shalekv.write.pending_replies import PendingReply

TURN_COUNT = 128  # operations begun between two chances for other tasks: some milliseconds
RESULT_FRAME_BYTES = 24  # tags, lengths and id of a result in a message
# Memory of an unanswered operation and of an unread result beside their bytes, measured. The log
# accounts for its own memory of a write.
OPERATION_OVERHEAD_BYTES = 1_000
RESULT_OVERHEAD_BYTES = 600
KINDS = ("get", "batch_get", "put", "delete", "delete_range", "write", "txn")
Describe: TypeAlias = Callable[[BaseException], kv_pb2.OperationError]
_Method: TypeAlias = Callable[[Any, Call], Answer[Any]]
_Reply = Message | bytes
_Outcome: TypeAlias = _Reply | BaseException
_Pending: TypeAlias = asyncio.Future[Any] | PendingReply[Any]


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
        # If other sessions use up the budget, this one continues, one operation after the other.
        is_crowded = not self.budget.free_bytes and self.held_bytes > SMALL_BYTES
        return self.held_bytes <= self._bytes_max and not is_crowded

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
    """The results that were not sent yet, in the order in which they became ready."""

    def __init__(self, memory: HeldMemory) -> None:
        """Begin without results."""
        self.changed = asyncio.Event()  # there is a result, or the stream may have ended
        self._memory = memory
        self._ready: list[kv_pb2.SessionResult] = []

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, result: kv_pb2.SessionResult) -> None:
        """Add a result at the end."""
        self._memory.hold(result.ByteSize() + RESULT_OVERHEAD_BYTES)
        self._ready.append(result)
        self.changed.set()

    def take(self) -> tuple[kv_pb2.SessionReply, int]:
        """Take the results for one message, at least one, and the bytes that they hold."""
        count = held_bytes = message_bytes = 0
        for result in self._ready:
            result_bytes = result.ByteSize()
            message_bytes += result_bytes + RESULT_FRAME_BYTES
            if count and message_bytes > STREAM_MESSAGE_BYTES_MAX:
                break
            held_bytes += result_bytes + RESULT_OVERHEAD_BYTES
            count += 1
        reply = kv_pb2.SessionReply(results=self._ready[:count])
        del self._ready[:count]
        return reply, held_bytes

    def clear(self) -> None:
        """Drop all results."""
        self._ready.clear()


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
        counts: CallCounts,
        now_ms: Callable[[], float],
    ) -> None:
        """Create a session on `service`.

        `describe` converts the exception of an operation to the error that the client gets.
        `now_ms` is the clock of deadlines. All sessions of a server share `budget`.
        """
        self._limits = limits
        self._memory = HeldMemory(
            limits.session_bytes_max, budget or MemoryBudget(limits.sessions_bytes_max)
        )
        self._call = Call(peer=call.peer, write_order=FifoLock(), end=call.end)
        self._describe = describe
        self._methods: dict[str, tuple[_Method, MethodCount]] = {
            kind: (getattr(service, kind), counts.of(f"Session.{kind}")) for kind in KINDS
        }
        self._now_ms = now_ms
        self._now_ns = counts.now_ns
        # The unanswered operations: their bytes, and the futures or tasks of their answers.
        self._waiting: dict[int, tuple[int, _Pending]] = {}
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
                self._check(request)
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

    async def replies(self) -> AsyncIterator[kv_pb2.SessionReply]:
        """Yield results as they become ready, until the stream has ended and all are sent."""
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
        unanswered = [future for _, future in self._waiting.values()]
        self._waiting.clear()
        if self._memory.budget.stalls is not None:
            self._memory.budget.stalls.taken(self)
        for future in unanswered:
            future.cancel()

    async def end(self, error: StreamTooSlow) -> None:
        """Implement `Stream`."""
        self.close()
        self.refuse(error)
        if self._call.end is not None:
            self._call.end(error)

    def _begin(
        self, operation: kv_pb2.SessionOperation, index: int, tasks: asyncio.TaskGroup
    ) -> bool:
        """Begin an operation; returns True if it has a new task, which has not run yet."""
        kind: str = operation.WhichOneof("operation") or ""
        size_bytes = operation.ByteSize() + OPERATION_OVERHEAD_BYTES
        began_ns = self._now_ns()
        self._memory.hold(size_bytes)
        try:
            call = self._call_of(operation, kind, index)
            answer = self._methods[kind][0](getattr(operation, kind), call)
        except Exception as error:  # noqa: BLE001 - one operation must not end the others
            self._memory.hold(-size_bytes)
            self._results.add(kv_pb2.SessionResult(id=operation.id, error=self._describe(error)))
            self._count(kind, began_ns, has_failed=True)
            return False
        if isinstance(answer, _Reply):
            self._memory.hold(-size_bytes)
            self._add_reply(operation.id, kind, answer)
            self._count(kind, began_ns, has_failed=False)
            return False
        future: _Pending
        if isinstance(answer, asyncio.Future | PendingReply):
            future = answer
        else:
            future = tasks.create_task(_outcome(answer))
            if isinstance(answer, Coroutine):  # closed even if its task is cancelled before it runs
                future.add_done_callback(lambda _: answer.close())
        self._waiting[operation.id] = (size_bytes, future)
        future.add_done_callback(partial(self._done, operation.id, kind, began_ns))
        return future is not answer

    def _call_of(self, operation: kv_pb2.SessionOperation, kind: str, index: int) -> Call:
        """Check an operation, and return the context of its call."""
        if operation.id in self._waiting:
            problem = f"{operation.id} belongs to an operation that is not answered yet"
            raise InvalidRequest(f"operations[{index}].id", problem)
        if not kind:
            raise InvalidRequest(f"operations[{index}]", "no operation is set")
        raise_if(self._refusal)
        if not operation.timeout_ms:
            return self._call
        deadline_ms = self._now_ms() + operation.timeout_ms
        return Call(self._call.peer, deadline_ms, self._call.write_order)

    def _done(self, operation_id: int, kind: str, began_ns: int, future: _Pending) -> None:
        outcome = _outcome_of(future)
        self._count(kind, began_ns, has_failed=not isinstance(outcome, _Reply))
        if self._memory.is_closed:
            return
        size_bytes, _ = self._waiting.pop(operation_id)
        self._memory.hold(-size_bytes)
        if isinstance(outcome, _Reply):
            self._add_reply(operation_id, kind, outcome)
        else:
            self._results.add(kv_pb2.SessionResult(id=operation_id, error=self._describe(outcome)))

    def _count(self, kind: str, began_ns: int, *, has_failed: bool) -> None:
        """Count an operation that has ended, also if the client has gone."""
        if kind:  # an operation of an unknown kind is not counted
            self._methods[kind][1].add(self._now_ns() - began_ns, has_failed=has_failed)

    def _add_reply(self, operation_id: int, kind: str, reply: _Reply) -> None:
        result = kv_pb2.SessionResult(id=operation_id)
        if isinstance(reply, bytes):
            getattr(result, kind).MergeFromString(reply)
        else:
            getattr(result, kind).CopyFrom(reply)
        self._results.add(result)


async def _outcome(answer: Awaitable[_Reply]) -> _Outcome:
    """Await an answer, and return its error as a value: a task that fails would end its group."""
    try:
        return await answer
    except Exception as error:  # noqa: BLE001 - one operation must not end the others
        return error


def _outcome_of(future: _Pending) -> _Outcome:
    """Return the result or error of a future that is done."""
    if future.cancelled():
        return asyncio.CancelledError()
    return future.exception() or future.result()
