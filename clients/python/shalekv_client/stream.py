"""One KV.Session call, and the queue of operations that it sends.

`Outbox` decides in which order, in which messages, and how many at once operations are sent.
`SessionStream` writes its messages to the call and completes the futures of the operations with the
answers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from shalekv.v1 import kv_pb2
from shalekv_client.error_table import error_of_operation, error_of_stream, not_an_answer
from shalekv_client.errors import (
    AccessUnknown,
    ConnectionLost,
    ErrorDetails,
    NotApplied,
    Overloaded,
    PermissionDenied,
    ShaleKVError,
    Stopping,
    Unauthenticated,
    Unimplemented,
)
from shalekv_client.operations import Note, Operation, note_nothing, varint
from shalekv_client.policies import UNANSWERED_BYTES_MAX
from shalekv_wire.calls import ClientStream
from shalekv_wire.status import CallFailed

# Messages are not larger, so that the server can begin with one while the next is on its way.
MESSAGE_BYTES_MAX = 1024 * 1024
MESSAGE_COUNT_MAX = 1_000  # more save nothing, and servers may be set to accept fewer than 10,000
SHRINK_COUNT, SHRINK_BYTES = 8, 4
SHRUNK_BYTES_MIN = 32 * 1024  # less than the smallest limit that a server can be set to
OVERHEAD_BYTES = 16  # of an operation in a message: its id, two tags and two lengths
TIMEOUT_MS_MAX = 2**32 - 1  # of an operation; 49 days

# A server that refuses a stream with one of these has answered every operation that it had begun.
REFUSED_CALLERS = (Unauthenticated, PermissionDenied, AccessUnknown)
REFUSALS = (Stopping, Overloaded, Unimplemented, *REFUSED_CALLERS)


@dataclass(slots=True, eq=False)
class Pending:
    """An operation with a caller that waits for its result."""

    number: int  # its id in the session; operations are sent in this order
    operation: Operation[Any]
    future: asyncio.Future[Any]
    size_bytes: int
    timeout_ms: float = 0.0  # for the answer; 0: as long as the session lasts
    due_s: float = 0.0  # the end of the timeout, by the clock of the loop
    is_sent: bool = False  # once it is sent, its outcome is unknown until it is answered

    def fail(self, error: ShaleKVError) -> None:
        """Complete the future with a new object of this error, unless it is done.

        It has the names of the operation, if it has none.
        """
        if not self.future.done():
            self.future.set_exception(error.again(*self.operation.names))


Message: TypeAlias = list[Pending]
ResultT = TypeVar("ResultT")


class Outbox:
    """A queue of operations with a bound on the bytes that are sent and unanswered.

    While too many bytes are unanswered, operations stay in the queue.
    """

    def __init__(
        self,
        *,
        bytes_max: int = UNANSWERED_BYTES_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        message_count_max: int = MESSAGE_COUNT_MAX,
    ) -> None:
        """Create an empty queue.

        `bytes_max` bounds what is unanswered; a larger operation is sent when nothing else is
        unanswered. An operation larger than `message_bytes_max` has a message to itself.
        """
        self._bytes_max = bytes_max
        self.message_bytes_max = message_bytes_max
        self._message_count_max = message_count_max
        self._queue: OrderedDict[int, Pending] = OrderedDict()
        self._queued_bytes = 0
        self._unanswered_bytes = 0
        self._work = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []  # until fewer bytes are held
        self._numbers = count(1)

    def __len__(self) -> int:
        """Return the number of operations that wait to be sent."""
        return len(self._queue)

    @property
    def unanswered_bytes(self) -> int:
        """Bytes of the operations that are sent and unanswered."""
        return self._unanswered_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all unanswered operations, sent or not."""
        return self._queued_bytes + self._unanswered_bytes

    def submit(self, operation: Operation[ResultT], timeout_ms: float = 0.0) -> Pending:
        """Queue an operation that is to be answered within `timeout_ms`; 0: there is no limit."""
        loop = asyncio.get_running_loop()
        pending = Pending(
            next(self._numbers),
            operation,
            loop.create_future(),
            len(operation.data)
            + len(operation.traceparent)
            + len(operation.request_id)
            + OVERHEAD_BYTES,
            timeout_ms,
            loop.time() + timeout_ms / 1_000 if timeout_ms else 0.0,
        )
        self.add(pending)
        return pending

    def add(self, pending: Pending) -> None:
        """Queue an operation that has a number."""
        self._queue[pending.number] = pending
        self._queued_bytes += pending.size_bytes
        self._work.set()

    def withdraw(self, pending: Pending) -> None:
        """Take back an operation whose caller has given up; one that was sent is not affected."""
        if self._queue.pop(pending.number, None) is not None:
            self._queued_bytes -= pending.size_bytes
            self._notify_waiters()

    def take(self) -> Message:
        """Return the next message, counted as sent.

        It is empty when nothing is queued or too many bytes are unanswered.
        """
        message: Message = []
        size_bytes = 0
        while self._queue and len(message) < self._message_count_max:
            _, pending = self._queue.popitem(last=False)
            if pending.future.done():  # its caller has given up
                self._queued_bytes -= pending.size_bytes
                self._notify_waiters()
                continue
            if not self._fits(size_bytes, pending):
                self._queue[pending.number] = pending
                self._queue.move_to_end(pending.number, last=False)
                break
            size_bytes += pending.size_bytes
            pending.is_sent = True
            message.append(pending)
        self._queued_bytes -= size_bytes
        self._unanswered_bytes += size_bytes
        return message

    def answered(self, size_bytes: int) -> None:
        """Note that so many bytes of sent operations are answered, or will never be."""
        self._unanswered_bytes -= size_bytes
        if self._queue:
            self._work.set()
        if self._waiters:
            self._notify_waiters()

    def clear(self) -> list[Pending]:
        """Empty the queue; return the operations that were in it."""
        left = list(self._queue.values())
        self._queue.clear()
        self._queued_bytes = 0
        self._notify_waiters()
        return left

    def take_back(self, unanswered: Iterable[Pending]) -> None:
        """Put sent operations before all others, in their order: the server has not begun them."""
        for pending in sorted(unanswered, key=lambda each: each.number, reverse=True):
            pending.is_sent = False
            self._queue[pending.number] = pending
            self._queue.move_to_end(pending.number, last=False)
            self._queued_bytes += pending.size_bytes
            self._unanswered_bytes -= pending.size_bytes

    def shrink(self) -> None:
        """Make smaller messages from now on, because the server has refused this size."""
        self._message_count_max = max(1, self._message_count_max // SHRINK_COUNT)
        smaller_bytes = max(SHRUNK_BYTES_MIN, self.message_bytes_max // SHRINK_BYTES)
        self.message_bytes_max = min(self.message_bytes_max, smaller_bytes)

    def wake(self) -> None:
        """Let `wait_for_work` return."""
        self._work.set()

    async def wait_for_work(self) -> None:
        """Wait until `take` may return a message again, or `wake` is called."""
        self._work.clear()
        await self._work.wait()

    async def held_at_most(self, bytes_max: int) -> None:
        """Wait until `held_bytes` is at most `bytes_max`."""
        while self.held_bytes > bytes_max:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _notify_waiters(self) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fits(self, size_bytes: int, pending: Pending) -> bool:
        if size_bytes + self._unanswered_bytes == 0:
            return True
        fits_message = not size_bytes or size_bytes + pending.size_bytes <= self.message_bytes_max
        unanswered_bytes = self._unanswered_bytes + size_bytes + pending.size_bytes
        return fits_message and unanswered_bytes <= self._bytes_max


class SessionStream:
    """One KV.Session call: sends operations in the order of the outbox, receives answers in any.

    The next stream can take over the outbox: a retired stream takes nothing more from it, and ends
    when no caller waits for an answer on it.
    """

    def __init__(
        self,
        call: ClientStream,
        outbox: Outbox,
        address: str,
        note: Note = note_nothing,
        *,
        keeps_refused: bool = False,
    ) -> None:
        """Use `call`, which has begun; errors name `address`, that of the server.

        With `keeps_refused`, operations whose caller is not known (any more) count as unanswered:
        the stream is retired, and `give_back` lets another one send them.
        """
        self.has_answered = False  # at least once
        # The last reply, or, if that is later, when answers became due after a pause.
        self.alive_at_s = asyncio.get_running_loop().time()
        self._call = call
        self._outbox = outbox
        self._address = address
        self._note = note
        self._unanswered: dict[int, Pending] = {}
        self._refused: dict[int, Unauthenticated] | None = {} if keeps_refused else None
        self._is_retired = self._is_patient = self._has_sent = False

    @property
    def is_waiting(self) -> bool:
        """Return whether an answer is due."""
        return len(self._unanswered) > len(self._refused or ())

    @property
    def is_retired(self) -> bool:
        """Return whether it takes nothing more from the outbox."""
        return self._is_retired

    def refusal(self, reason: ShaleKVError) -> Unauthenticated | None:
        """Return the refusal of its caller, if it has ended because of that, for `reason`.

        Then the server has begun none of the unanswered operations.
        """
        if isinstance(reason, Unauthenticated):
            return reason
        if self.is_waiting or not self._refused:
            return None
        return next(iter(self._refused.values())).unnamed()  # that of all of them

    def has_begun_none(self, reason: ShaleKVError) -> bool:
        """Return whether the server has begun none of the unanswered operations.

        `reason` is why the stream has ended.
        """
        return not self._has_sent or isinstance(reason, REFUSALS)

    async def run(self) -> ShaleKVError:
        """Write and read until the call is over; return the reason why it ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write())
                reason = await self._read()
                writing.cancel()
            return reason
        finally:
            self._call.cancel()

    def retire(self, *, is_patient: bool = False) -> None:
        """Take nothing more from the outbox, and end when no caller waits for an answer.

        With `is_patient`, it ends when all is answered, also what no caller waits for any more.
        """
        self._is_retired = True
        self._is_patient = is_patient
        self._outbox.wake()

    def end(self, reason: ShaleKVError) -> None:
        """Fail the unanswered operations because of `reason`, which ended the stream."""
        if isinstance(reason, NotApplied) and not isinstance(reason, REFUSALS):
            # The error is about the stream: it does not prove that no operation was applied.
            reason = ConnectionLost(reason.details)
        unanswered, self._unanswered = self._unanswered, {}
        self._outbox.answered(sum(pending.size_bytes for pending in unanswered.values()))
        refused = self._refused or {}
        for pending in unanswered.values():
            pending.fail(refused.get(pending.number, reason))

    def give_back(self) -> None:
        """Put the unanswered operations back into the outbox: the server has begun none of them."""
        unanswered, self._unanswered = self._unanswered, {}
        self._outbox.take_back(unanswered.values())

    async def _write(self) -> None:
        try:
            first = self._outbox.take()
            self._unanswered.update((pending.number, pending) for pending in first)
            await self._call.wait_open()  # before the server is told how much time is left
            if first:
                await self._call.write(self._request(first))
            while not self._is_retired:
                message = self._outbox.take()
                if message:
                    await self._call.write(self._request(message))
                else:
                    await self._outbox.wait_for_work()
            await self._call.done_writing()
        except CallFailed:
            return  # the call is over: `_read` learns why
        if self._is_patient:
            return
        if waited := [p.future for p in self._unanswered.values() if not p.future.done()]:
            await asyncio.wait(waited)
        if self._unanswered:  # their callers have given up
            self._call.cancel()

    def _request(self, message: Message) -> bytes:
        """Return the encoded `SessionRequest` of these operations, which count as sent."""
        self._has_sent = True
        now_s = asyncio.get_running_loop().time()
        if not self._unanswered:
            self.alive_at_s = now_s
        unanswered = self._unanswered
        parts: list[bytes] = []
        for pending in message:
            unanswered[pending.number] = pending
            kind, data, *_ = pending.operation
            fields = b"\x08%b%b%b" % (varint(pending.number), kind.tag, varint(len(data)))
            timeout = b""
            if pending.due_s:
                left_ms = int(min(max(1_000 * (pending.due_s - now_s), 1), TIMEOUT_MS_MAX))
                timeout = b"\x48" + varint(left_ms)
            names = b""
            if pending.operation.traceparent:
                names = _text(b"\x52", pending.operation.traceparent)
            if pending.operation.request_id:
                names += _text(b"\x5a", pending.operation.request_id)
            size_bytes = len(fields) + len(data) + len(timeout) + len(names)
            parts += (b"\x0a", varint(size_bytes), fields, data, timeout, names)
        return b"".join(parts)

    async def _read(self) -> ShaleKVError:
        try:
            while (data := await self._call.read()) is not None:
                reply = kv_pb2.SessionReply.FromString(data)
                self.has_answered = True
                self.alive_at_s = asyncio.get_running_loop().time()
                self._take(reply)
        except CallFailed as error:
            return error_of_stream(self._address, error)
        except DecodeError:
            return not_an_answer(self._address, "Session")
        message = "the server has ended the session"
        return ConnectionLost(ErrorDetails(self._address, "UNAVAILABLE", message))

    def _take(self, reply: kv_pb2.SessionReply) -> None:
        """Complete the operations whose results are in a reply."""
        size_bytes = 0
        for result in reply.results:
            if self._refused is not None and self._keep(result, self._refused):
                continue
            pending = self._unanswered.pop(result.id, None)
            if pending is None:
                continue  # no operation with this id is unanswered
            size_bytes += pending.size_bytes
            if not pending.future.done():  # its caller has not given up
                self._complete(pending, result)
        self._outbox.answered(size_bytes)

    def _keep(self, result: kv_pb2.SessionResult, refused: dict[int, Unauthenticated]) -> bool:
        """Return whether the caller of an operation was not known, which is kept then.

        When a later one has any other result, those before must not be sent after it: they fail.
        An error may be the answer to an operation that was begun, or even applied.
        """
        if result.HasField("error"):
            error = error_of_operation(self._address, result.error)
            if isinstance(error, Unauthenticated) and result.id in self._unanswered:
                refused[result.id] = error
                self.retire(is_patient=True)
                return True
        for number in [each for each in refused if each < result.id]:
            pending = self._unanswered.pop(number)
            self._outbox.answered(pending.size_bytes)
            pending.fail(refused.pop(number))
        return False

    def _complete(self, pending: Pending, result: kv_pb2.SessionResult) -> None:
        operation, future = pending.operation, pending.future
        name = operation.kind.name
        if result.HasField(name):  # type: ignore[arg-type] # the name of a field
            reply = getattr(result, name)
            try:
                self._note(operation, reply)
                future.set_result(operation.decode(reply))
            except ValueError:
                pending.fail(not_an_answer(self._address, str(operation.kind)))
            except ShaleKVError as refusal:  # the reply shows too little, or another database
                future.set_exception(refusal)
        elif result.HasField("error"):
            pending.fail(error_of_operation(self._address, result.error))
        else:
            pending.fail(not_an_answer(self._address, str(operation.kind)))


def _text(tag: bytes, text: str) -> bytes:
    """Return a field with this text."""
    encoded = text.encode()
    return b"%b%b%b" % (tag, varint(len(encoded)), encoded)
