"""Sends the concurrent operations of one client together, in the messages of one session.

A message costs far more than an operation. Operations that are submitted in the same turn of the
event loop, or while an earlier message is being written, go into one message. The first operation
opens the session, and it is opened again after a failure. Operations that a failed session had not
answered fail; `shalekv_client.routing.retry` decides whether they are repeated.

After `STREAM_AGE_S` the next operation opens a new stream, and the old one ends when it has
answered. So the client leaves connections before the server closes them for their age, and an idle
client holds no stream open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeAlias, TypeVar

from shalekv_client.closing import abandoned, client_closed
from shalekv_client.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DeadlinePassed,
    ErrorDetails,
    InvalidRequest,
    NotSent,
    ShaleKVError,
    Unimplemented,
    Unreachable,
)
from shalekv_client.operations import Note, Operation, SessionAbsent, note_nothing
from shalekv_client.stream import (
    OVERHEAD_BYTES,
    REFUSED_CALLERS,
    Outbox,
    Pending,
    SessionStream,
)
from shalekv_wire.calls import ClientStream

BUCKET_MS = 5.0  # an operation gets at most this much more time than its timeout
STREAM_AGE_S = 10.0  # far less than the 30 s that a server leaves to calls on an old connection
REOPEN_INITIAL_S = 0.02
REOPEN_MAX_S = 1.0
ABSENT_S = 60.0  # after this time sessions are tried again: the server may have been replaced

Bucket: TypeAlias = set[Pending]
ResultT = TypeVar("ResultT")
_JITTER = Random()  # noqa: S311 (not the global one, which programs may seed)


class Deadlines:
    """Deadlines of many operations with one timer: calls `expire` for each one that passes.

    Nearly all operations are answered long before their deadline, so adding and discarding a
    deadline must be cheap. Deadlines are collected in buckets of `BUCKET_MS`, and the timer is set
    for the first bucket that may hold an operation.
    """

    def __init__(self, expire: Callable[[Pending], None]) -> None:
        """Needs a running event loop."""
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._buckets: dict[int, Bucket] = {}
        self._numbers: list[int] = []  # of the buckets; a heap
        self._timer: asyncio.TimerHandle | None = None

    def add(self, pending: Pending, timeout_ms: float) -> Bucket:
        """Add a deadline; return the bucket, which `discard` needs to take it back."""
        number = int((self._loop.time() * 1000.0 + timeout_ms) / BUCKET_MS) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = set()
            heappush(self._numbers, number)
            if self._numbers[0] == number:
                self._set_timer()
        bucket.add(pending)
        return bucket

    @staticmethod
    def discard(bucket: Bucket, pending: Pending) -> None:
        """Take a deadline back."""
        bucket.discard(pending)
        if not bucket:
            bucket.clear()  # frees the memory of a large set: a bucket lives until its time comes

    def close(self) -> None:
        """Expire nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._numbers[0] * BUCKET_MS / 1000.0, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time() * 1000.0 / BUCKET_MS
        self._timer = None
        while self._numbers and (self._numbers[0] <= now or not self._buckets[self._numbers[0]]):
            for pending in self._buckets.pop(heappop(self._numbers)):
                self._expire(pending)
        if self._numbers:
            self._set_timer()


class _Backoff:
    """The delay before a session is opened again: longer after each failure in a row."""

    def __init__(self, open_again: Callable[[], None]) -> None:
        self._open_again = open_again
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at_s = 0.0
        self._failures = 0
        self.last_failure: ShaleKVError | None = None

    @property
    def is_on(self) -> bool:
        """Return whether the delay after a failure is not over yet."""
        return asyncio.get_running_loop().time() < self._ends_at_s

    @property
    def why(self) -> str:
        """The last failure, for messages."""
        failure = self.last_failure
        return "" if failure is None else f"the last session ended with: {failure.details.message}"

    def failed(self, reason: ShaleKVError, *, has_answered: bool) -> None:
        """Begin the delay after a failure; a session that has answered is the first to fail.

        It is no shorter than the server advises.
        """
        self._failures = 1 if has_answered else self._failures + 1
        chance = _JITTER.random()
        longest_s = min(REOPEN_MAX_S, REOPEN_INITIAL_S * 2.0 ** (self._failures - 1))
        advice_s = (reason.details.retry_after_ms or 0) / 1_000.0
        delay_s = max(longest_s * (0.5 + 0.5 * chance), advice_s * (1.0 + 0.5 * chance))
        self._ends_at_s = asyncio.get_running_loop().time() + delay_s
        self.last_failure = reason

    def clear(self) -> None:
        """End the delay."""
        self._ends_at_s = 0.0

    def open_when_over(self) -> None:
        """Call `open_again` once, at the end of the delay."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._ends_at_s, self._on_timer)

    def close(self) -> None:
        """Call `open_again` no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self._open_again()


class Coalescer:
    """Sends operations of many callers in one session; each caller gets its own result."""

    def __init__(
        self,
        open_call: Callable[[], ClientStream],
        *,
        address: str,
        outbox: Outbox,
        stream_age_s: float = STREAM_AGE_S,
        note: Note = note_nothing,
        is_alone: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create a coalescer. Needs a running loop.

        `open_call` begins a KV.Session call to the server at `address`; `outbox` is empty. After a
        session has failed, operations wait until it is opened again while `is_alone()`: no other
        server is known. Otherwise they fail as not sent, and can go to another server.
        """
        self._note = note
        self._is_alone = is_alone
        self._open_call = open_call
        self._address = address
        self._stream_age_s = stream_age_s
        self._outbox = outbox
        self._deadlines = Deadlines(self._expire)
        self._stream: SessionStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._backoff = _Backoff(self._open_if_needed)
        self._absent_until_s = 0.0
        self._is_closed = False

    def takes(self, operation: Operation[ResultT]) -> bool:
        """Return whether this operation is to be sent in the session.

        Large operations are not: all others would have to wait for them. Nor are those that
        sessions do not have.
        """
        if not operation.kind.tag:
            return False
        now_s = asyncio.get_running_loop().time()
        has_sessions = not self._absent_until_s or now_s >= self._absent_until_s
        size_bytes = len(operation.data) + OVERHEAD_BYTES
        return has_sessions and size_bytes <= self._outbox.message_bytes_max

    async def call(self, operation: Operation[ResultT], timeout_ms: float) -> ResultT:
        """Send `operation` and return its result, within `timeout_ms`.

        Raises the errors of `shalekv_client.errors`; `SessionAbsent` when the server has no
        sessions.
        """
        if self._is_closed:
            raise client_closed(self._address)
        if self._stream is None and self._backoff.is_on and not self._is_alone():
            raise self._not_sent(operation)
        pending = self._outbox.submit(operation, timeout_ms)
        bucket = self._deadlines.add(pending, timeout_ms)
        if self._stream is None:
            self._open()
        future: asyncio.Future[ResultT] = pending.future
        try:
            return await future
        finally:
            self._deadlines.discard(bucket, pending)
            if not pending.is_sent:
                self._outbox.withdraw(pending)

    def renew(self) -> None:
        """Send operations in another session from now on: the metadata of calls has changed."""
        self._backoff.clear()
        if self._stream is not None:
            self._retire(self._stream)
        self._open_if_needed()

    async def aclose(self) -> None:
        """End the session; unanswered operations fail."""
        self._is_closed = True
        self._deadlines.close()
        self._backoff.close()
        for pending in self._outbox.clear():
            pending.fail(client_closed(self._address))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self) -> None:
        if self._stream is not None or self._is_closed:
            return
        if self._backoff.is_on:
            self._backoff.open_when_over()
            return
        stream = self._stream = SessionStream(
            self._open_call(), self._outbox, self._address, self._note
        )
        task = asyncio.get_running_loop().create_task(self._run(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _open_if_needed(self) -> None:
        if self._outbox:
            self._open()

    async def _run(self, stream: SessionStream) -> None:
        loop = asyncio.get_running_loop()
        retirement = loop.call_later(self._stream_age_s, self._retire, stream)
        reason: ShaleKVError | None = None
        try:
            reason = await stream.run()
        finally:
            retirement.cancel()
            if reason is None:
                reason = abandoned(self._address, "the client")
            self._ended(stream, reason)

    def _retire(self, stream: SessionStream) -> None:
        stream.retire()
        self._replace(stream)

    def _ended(self, stream: SessionStream, reason: ShaleKVError) -> None:
        if _is_about_messages(reason):
            self._outbox.shrink()
            reason = ConnectionLost(reason.details)
        if isinstance(reason, Unimplemented) and not stream.has_answered:
            self._absent_until_s = asyncio.get_running_loop().time() + ABSENT_S
            reason = SessionAbsent(reason.details)
            for pending in self._outbox.clear():
                pending.fail(reason)
        elif stream is self._stream:
            self._backoff.failed(reason, has_answered=stream.has_answered)
            if isinstance(reason, REFUSED_CALLERS):  # as the next session will be, most likely
                for pending in self._outbox.clear():
                    pending.fail(reason)
            elif not self._is_alone():
                for pending in self._outbox.clear():
                    pending.fail(self._not_sent(pending.operation))
        stream.end(reason)
        self._replace(stream)

    def _replace(self, stream: SessionStream) -> None:
        if stream is self._stream:
            self._stream = None
            self._open_if_needed()

    def _not_sent(self, operation: Operation[Any]) -> ShaleKVError:
        """Return the error for an operation that must not wait for the next session."""
        failure = self._backoff.last_failure
        if isinstance(failure, REFUSED_CALLERS):
            return failure.again()
        if operation.read_level is not None and isinstance(failure, Unreachable):
            return failure.again()  # says more than that the read was not sent
        message = f"not sent: {self._backoff.why}"
        return NotSent(ErrorDetails(self._address, "UNAVAILABLE", message))

    def _expire(self, pending: Pending) -> None:
        if pending.is_sent:
            message = f"no answer within {pending.timeout_ms:.0f} ms"
            details = ErrorDetails(self._address, "DEADLINE_EXCEEDED", message)
            pending.fail(DeadlineExceeded(details))
            return
        message = f"could not be sent within {pending.timeout_ms:.0f} ms"
        if self._stream is None and (failure := self._backoff.last_failure):
            if isinstance(failure, REFUSED_CALLERS):
                pending.fail(failure)
                return
            message += f"; {self._backoff.why}"
        pending.fail(DeadlinePassed(ErrorDetails(self._address, "DEADLINE_EXCEEDED", message)))


def _is_about_messages(reason: ShaleKVError) -> bool:
    """Return whether the server may have ended the stream because a message was too large.

    A message with more operations or bytes than the server accepts ends the stream with an error
    that belongs to no single operation.
    """
    is_bare = not reason.reason
    return isinstance(reason, InvalidRequest) or (is_bare and reason.code == "RESOURCE_EXHAUSTED")
