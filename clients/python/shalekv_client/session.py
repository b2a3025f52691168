"""An explicit session: a pipeline of operations, sent in order without waiting for each answer.

async with client.session() as session:
    for key, value in pairs:
        futures.append(session.put(key, value))
        await session.ready()
commits = [future.result() for future in futures]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from shalekv_client import operations
from shalekv_client.closing import AsyncCloseable, abandoned
from shalekv_client.error_table import silence, too_large
from shalekv_client.errors import (
    ErrorDetails,
    NotApplied,
    NotSent,
    ShaleKVError,
    Unauthenticated,
)
from shalekv_client.operations import Note, Operation
from shalekv_client.policies import Destination
from shalekv_client.routing.fleet import Fleet
from shalekv_client.routing.retry import RetryPolicy, may_repeat
from shalekv_client.routing.servers import Server
from shalekv_client.routing.spans import begin_span
from shalekv_client.stream import (
    MESSAGE_BYTES_MAX,
    OVERHEAD_BYTES,
    REFUSALS,
    Outbox,
    SessionStream,
)
from shalekv_wire.calls import ClientStream

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


END_TIMEOUT_S = 1.0  # for the server to end a session in which everything is answered
_JITTER = Random()  # noqa: S311 (not the global one, which programs may seed)


class SessionServer(Protocol):
    """The server at which a session is opened."""

    @property
    def address(self) -> str: ...

    @property
    def note(self) -> Note: ...

    def open_session(self) -> ClientStream: ...


class StreamServers:
    """Finds the server of each stream of one session: the writer."""

    def __init__(self, fleet: Fleet, policy: RetryPolicy, timeout_ms: int) -> None:
        """Search among the servers of `fleet`, for one stream at most `timeout_ms`."""
        self._fleet = fleet
        self._policy = policy
        self._timeout_ms = timeout_ms
        self._token_number = 0  # of the access token of the last stream
        self._server: Server | None = None  # of the last stream
        self._failures = 0  # of the attempts to open the present stream
        self._deadline_s = 0.0  # of the last such attempt, by the clock of the loop

    async def find(self, refusal: ShaleKVError | None) -> Server:
        """Return the server of the next stream, or of another attempt to open it.

        `refusal` is why the last one has ended, if another server or token may help. Raises it if
        there is none, or no attempt is left; and the errors of `Fleet.pick`.
        """
        left_ms: float = self._timeout_ms
        if self._server is not None and not isinstance(refusal, Unauthenticated | None):
            left_ms = await self._pause(self._server, refusal)
        else:
            if refusal is not None and not await self._fleet.renewed(self._token_number, left_ms):
                raise self._fleet.explained_refusal(refusal)
            self._failures = 0
            self._deadline_s = asyncio.get_running_loop().time() + left_ms / 1_000.0
        self._server = await self._fleet.pick(Destination.WRITER, left_ms)
        self._token_number = self._fleet.token_number
        return self._server

    async def _pause(self, server: Server, refusal: ShaleKVError) -> float:
        """Wait before another attempt, unless it is in vain; return the time left for it in ms."""
        self._failures += 1
        error = self._fleet.explained(server, refusal)
        may_help = self._fleet.failed(server, error, Destination.WRITER)
        if not may_help and not may_repeat(error, is_repeatable=True):
            raise error
        chance = _JITTER.random()
        delay_s = self._policy.backoff_ms(self._failures, error, chance) / 1_000.0
        left_s = self._deadline_s - asyncio.get_running_loop().time() - delay_s
        if left_s <= 0 or self._failures >= self._policy.attempts_max:
            raise error
        await asyncio.sleep(delay_s)
        return left_s * 1_000.0


def _queued(
    build: Callable[ArgumentsP, Operation[ResultT]],
) -> Callable[Concatenate[Session, ArgumentsP], asyncio.Future[ResultT]]:
    """Make a method that queues the operation which `build` makes of its arguments."""

    def queue(
        session: Session, /, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs
    ) -> asyncio.Future[ResultT]:
        return session.submit(build(*args, **kwargs))

    queue.__name__, queue.__doc__ = build.__name__, build.__doc__
    return queue


class Session(AsyncCloseable):
    """A pipeline of operations to the writer. Needs `async with`; belongs to one event loop.

    Each method sends the operation of the `Client` method with the same name, and returns at once
    with a future of the result. Operations that change something are applied in the order of the
    calls. Futures complete in any order, with the errors of `shalekv_client.errors`.

    Nothing is repeated, because a repeat would come after the operations that were sent behind it.
    When the session fails, it can't be used any more, and all open futures fail: those of
    operations that were sent with a subclass of `OutcomeUnknown`, the others with a subclass of
    `NotApplied`. To be able to repeat a write safely, give it an `idempotency_key` of your own. The
    session also fails when answers are due and none at all comes for the timeout of the client.

    When the client gets another access token, the session goes on with that as soon as everything
    is answered that was sent with the old one. If the old one ends before, what the server has not
    begun is sent again, in its order. Without another token, the session ends then, and raises
    `Unauthenticated` for what was certainly not applied: open another one when there is a token.
    If no server takes up the session with the new token, because it is overloaded or stops, say,
    that is tried again for as long as the retries and the timeout of the client allow, unless an
    operation may have been begun.

    Leaving the block waits for all answers. It does not raise the errors that futures carry. If an
    exception ends the block, nothing is waited for, and open futures fail.
    """

    def __init__(
        self,
        find: Callable[[ShaleKVError | None], Awaitable[SessionServer]],
        *,
        address: str,
        bytes_max: int,
        silence_ms: int,
        message_bytes_max: int,
        can_renew: bool,
    ) -> None:
        """Create a session; `Client.session` does so.

        An operation has at most `message_bytes_max` bytes. `find` finds the server; until then
        errors name `address`. It gets the refusal of the last server if the caller was not known
        there, or the server did not go on with the session, and raises it unless another attempt
        may succeed. `can_renew` says that there may be another access token.
        """
        self._find = find
        self._address = address
        self._bytes_max = bytes_max
        self._message_bytes_max = message_bytes_max
        target_bytes = min(MESSAGE_BYTES_MAX, message_bytes_max)
        self._outbox = Outbox(bytes_max=bytes_max, message_bytes_max=target_bytes)
        self._stream: SessionStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._silence_ms = silence_ms
        self._can_renew = can_renew
        self._failure: ShaleKVError | None = None  # of all operations from now on
        self._is_closed = False

    get = _queued(operations.get)
    describe = _queued(operations.describe)
    batch_get = _queued(operations.batch_get)
    put = _queued(operations.put)
    delete = _queued(operations.delete)
    delete_range = _queued(operations.delete_range)
    add = _queued(operations.add)
    touch = _queued(operations.touch)
    write = _queued(operations.write)
    txn = _queued(operations.txn)

    def submit(self, operation: Operation[ResultT]) -> asyncio.Future[ResultT]:
        """Queue an operation. Raises `NotSent` when the session is closed."""
        if self._is_closed:
            raise self.closed()
        operation = operations.in_context(operation)
        span = None if operation.traceparent else begin_span(operation.kind.name)
        if span is not None:
            operation = operation._replace(traceparent=span.traceparent)
        future = self._submit(operation)
        if span is not None:
            span.sent_to(self._address)
            future.add_done_callback(span.end_with)
        return future

    def _submit(self, operation: Operation[ResultT]) -> asyncio.Future[ResultT]:
        loop = asyncio.get_running_loop()
        size_bytes = len(operation.data) + OVERHEAD_BYTES
        refusal = self._failure
        if size_bytes > self._message_bytes_max:
            refusal = too_large(
                self._address, str(operation.kind), size_bytes, self._message_bytes_max
            )
        if refusal is not None:
            refused: asyncio.Future[ResultT] = loop.create_future()
            refused.set_exception(refusal.again(*operation.names))
            return refused
        future: asyncio.Future[ResultT] = self._outbox.submit(operation).future
        if self._task is None:
            self._task = loop.create_task(self._run())
        return future

    @property
    def address(self) -> str:
        """The address of the last server, or that at which the search for it begins."""
        return self._address

    def closed(self) -> NotSent:
        """Return the error for an operation that is submitted to a closed session."""
        return self._not_sent("the session is closed")

    async def ready(self) -> None:
        """Wait until the unanswered operations fit into the session's limit of bytes."""
        await self._outbox.held_at_most(self._bytes_max)

    async def drain(self) -> None:
        """Wait until every operation is answered or has failed."""
        await self._outbox.held_at_most(0)

    def renew(self) -> None:
        """Go on in another stream when this one has answered all: there is another token."""
        if self._stream is not None:
            self._stream.retire(is_patient=True)

    async def aclose(self) -> None:
        """End the session without waiting; unanswered operations fail."""
        self._is_closed = True
        if self._task is None:
            return
        if self._stream is not None and not self._outbox.held_bytes:
            self._stream.retire()
            await asyncio.wait([self._task], timeout=END_TIMEOUT_S)
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
            reason = await self._use_streams()
        except ShaleKVError as error:  # no server was found
            reason = error
        finally:
            if reason is None:
                reason = abandoned(self._address, "the session")
            self._ended(reason)

    async def _use_streams(self) -> ShaleKVError:
        """Send in one stream after the other; return the reason why the last one has ended.

        The next one begins when the one before has answered all that the server has begun of it. If
        that one is refused at once, it is opened again.
        """
        refusal: ShaleKVError | None = None
        is_first, has_renewed = True, False
        while True:
            stream = self._open(await self._find(refusal))
            reason = await _run_unless_silent(stream, self._address, self._silence_ms)
            has_renewed = has_renewed and not stream.has_answered
            refusal = stream.refusal(reason)
            if refusal is not None:
                if has_renewed:
                    return reason
                has_renewed = True
            elif stream.is_waiting or not stream.is_retired:
                if is_first or stream.has_answered or not stream.has_begun_none(reason):
                    return reason
                refusal = reason
            stream.give_back()
            self._stream = None
            is_first = False
            while not self._outbox:
                if self._is_closed:
                    return reason
                await self._outbox.wait_for_work()

    def _open(self, server: SessionServer) -> SessionStream:
        self._address = server.address
        stream = self._stream = SessionStream(
            server.open_session(),
            self._outbox,
            server.address,
            server.note,
            keeps_refused=self._can_renew,
        )
        return stream

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

    def _not_sent(self, message: str) -> NotSent:
        return NotSent(ErrorDetails(self._address, "CANCELLED", message))


async def _run_unless_silent(stream: SessionStream, address: str, silence_ms: int) -> ShaleKVError:
    """Run a stream to its end, or until nothing came for `silence_ms` while answers were due.

    Returns the reason for the end; errors name `address`.
    """
    silence_s, quiet_s = silence_ms / 1000.0, 0.0
    running = asyncio.create_task(stream.run())
    try:
        while quiet_s < silence_s:
            await asyncio.wait([running], timeout=silence_s - quiet_s)
            if running.done():
                return running.result()
            now_s = asyncio.get_running_loop().time()
            quiet_s = now_s - stream.alive_at_s if stream.is_waiting else 0.0
        return silence(address, silence_ms)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
