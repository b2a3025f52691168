"""An explicit session: operations that are sent in order without waiting for one another.

async with client.session() as session:
    for key, value in pairs:
        futures.append(session.put(key, value))
        await session.ready()
commits = [future.result() for future in futures]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from shalekv_client import operations
from shalekv_client.closing import AsyncClosing, abandoned
from shalekv_client.error_table import silence, too_large
from shalekv_client.errors import (
    DeadlineExceeded,
    ErrorDetails,
    NotApplied,
    NotSent,
    ShaleKVError,
)
from shalekv_client.operations import Note, Operation
from shalekv_client.stream import (
    MESSAGE_BYTES_MAX,
    OVERHEAD_BYTES,
    REFUSALS,
    Outbox,
    Pending,
    SessionCall,
    Stream,
)

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


class SessionServer(Protocol):
    """The server that a session goes to."""

    @property
    def address(self) -> str: ...

    @property
    def note(self) -> Note: ...

    def open_session(self) -> SessionCall: ...


LAST_WORDS_S = 1.0  # for the server to end a session in which all is answered


def _queued(
    build: Callable[ArgumentsP, Operation[ResultT]],
) -> Callable[Concatenate[Session, ArgumentsP], asyncio.Future[ResultT]]:
    """The method that queues what `build` makes of its arguments."""

    def queue(
        session: Session, /, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs
    ) -> asyncio.Future[ResultT]:
        return session.submit(build(*args, **kwargs))

    queue.__name__, queue.__doc__ = build.__name__, build.__doc__
    return queue


class Session(AsyncClosing):
    """A pipeline of operations to the writer. Needs `async with`; belongs to one event loop.

    Each method sends an operation as the method of `Client` with its name does, and returns at
    once with a future of its result. Operations that change something are applied in the order of
    the calls. Futures are completed in any order, with the errors of `shalekv_client.errors`.

    Nothing is repeated: a repeat would come after what was sent behind it. When the session
    fails, all open futures do, and it can't be used any more: those of operations that were sent
    with an error below `OutcomeUnknown`, those of others with one below `NotApplied`. To be able
    to repeat a write safely, give it an `idempotency_key` of your own. The session also fails
    when no answer at all comes for the timeout of the client while some are due.

    Leaving the block waits for all answers, and raises nothing that a future carries already. If
    the block ends by an exception, nothing is waited for: open futures fail.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[SessionServer]],
        *,
        address: str,
        bytes_max: int,
        silence_ms: int,
        message_bytes_max: int,
    ) -> None:
        """As `Client.session` makes it. An operation has at most `message_bytes_max` bytes.

        `find` finds the server; `address` is for errors until then.
        """
        self._find = find
        self._address = address
        self._bytes_max = bytes_max
        self._silence_ms = silence_ms
        self._message_bytes_max = message_bytes_max
        self._loop = asyncio.get_running_loop()
        cut_bytes = min(MESSAGE_BYTES_MAX, message_bytes_max)
        self._outbox = Outbox(bytes_max=bytes_max, message_bytes_max=cut_bytes)
        self._numbers = count(1)
        self._stream: Stream | None = None
        self._task: asyncio.Task[None] | None = None
        self._listening: asyncio.TimerHandle | None = None
        self._silence: DeadlineExceeded | None = None
        self._failure: ShaleKVError | None = None  # of all operations from now on
        self._is_closed = False

    get = _queued(operations.get)
    batch_get = _queued(operations.batch_get)
    put = _queued(operations.put)
    delete = _queued(operations.delete)
    delete_range = _queued(operations.delete_range)
    add = _queued(operations.add)
    write = _queued(operations.write)
    txn = _queued(operations.txn)

    def submit(self, operation: Operation[ResultT]) -> asyncio.Future[ResultT]:
        """Queue an operation; raises `NotSent` when the session is closed."""
        if self._is_closed:
            raise self.closed()
        future: asyncio.Future[ResultT] = self._loop.create_future()
        size_bytes = operation.size_bytes + OVERHEAD_BYTES
        pending = Pending(next(self._numbers), operation, future, size_bytes)
        refusal = self._failure
        if size_bytes > self._message_bytes_max:
            refusal = too_large(
                self._address, operation.method, size_bytes, self._message_bytes_max
            )
        if refusal is not None:
            pending.fail(refusal)
            return future
        self._outbox.add(pending)
        if self._task is None:
            self._task = self._loop.create_task(self._run())
        return future

    def closed(self) -> NotSent:
        """The error for what is asked of a session that is closed."""
        return self._not_sent("the session is closed")

    async def ready(self) -> None:
        """Wait while more bytes are unanswered than the session may hold."""
        await self._outbox.held_at_most(self._bytes_max)

    async def drain(self) -> None:
        """Wait until every operation is answered or has failed."""
        await self._outbox.held_at_most(0)

    async def aclose(self) -> None:
        """End the session without waiting; what is unanswered fails."""
        self._is_closed = True
        if self._task is None:
            return
        if self._stream is not None and not self._outbox.held_bytes:
            self._stream.retire()
            await asyncio.wait([self._task], timeout=LAST_WORDS_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aexit__(self, *error: object) -> None:
        self._is_closed = True
        try:
            if error[0] is None:
                await self.drain()
        finally:
            await self.aclose()

    async def _run(self) -> None:
        reason: ShaleKVError | None = None
        try:
            server = await self._find()
            self._address = server.address
            stream = Stream(server.open_session(), self._outbox, server.address, server.note)
            self._stream = stream
            self._listen(stream)
            reason = await stream.run()
        except ShaleKVError as error:  # there is no server for it
            reason = error
        finally:
            if self._listening is not None:
                self._listening.cancel()
            if reason is None:
                reason = self._silence or abandoned(self._address, "the session")
            self._ended(reason)

    def _ended(self, reason: ShaleKVError) -> None:
        is_begun = self._stream is not None
        is_refused = isinstance(reason, REFUSALS if is_begun else NotApplied)
        self._failure = (
            reason
            if is_refused
            else self._not_sent(f"the session is over: {reason.details.message}")
        )
        if self._stream is not None:
            self._stream.end(reason)
        for pending in self._outbox.clear():
            pending.fail(self._failure)

    def _listen(self, stream: Stream) -> None:
        """End a session that is silent for too long while answers are due."""
        silence_s = self._silence_ms / 1000.0
        quiet_s = self._loop.time() - stream.heard_at_s if stream.is_waiting else 0.0
        if quiet_s >= silence_s and self._task is not None:
            self._silence = silence(self._address, self._silence_ms)
            self._task.cancel()
        else:
            self._listening = self._loop.call_later(silence_s - quiet_s, self._listen, stream)

    def _not_sent(self, message: str) -> NotSent:
        return NotSent(ErrorDetails(self._address, "CANCELLED", message))
