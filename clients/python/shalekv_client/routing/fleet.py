"""Sends calls to the servers of one database, with retries, failover and hedging.

`Fleet.run` makes the attempts of one call, and `CallState` keeps what came of them. To add calls
beside those of `Client`, use its fleet, `client.fleet`:

    reply = await fleet.unary(                  # with failover, within the deadline
        lambda server: server.admin.CreateSnapshot, request,
        destination=Destination.WRITER, is_repeatable=False, timeout_ms=timeout_ms)

    tried = set()                               # a stream, one attempt at a time:
    server = await fleet.pick(Destination.BY_POLICY, timeout_ms, tried)
    call = server.kv.Watch(...)
    server.note_header(reply.header)            # for each reply
    fleet.failed(server, error, Destination.BY_POLICY)  # True: another server may succeed; then
    tried.add(server.endpoint)                  # `pick` again

Errors are those of `shalekv_client.errors`; `server.address` is for their details. When a call
fails because the client has dropped its server (`server.is_dropped`), which is not the writer any
more, `explained` returns the ConnectionLost or NotSent to raise instead.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from shalekv_client.errors import (
    DeadlineExceeded,
    DeadlinePassed,
    NotSent,
    NotTheWriter,
    NoWriter,
    OutcomeUnknown,
    Overloaded,
    SeqNotReached,
    ShaleKVError,
    Stopping,
    TooStale,
    Unimplemented,
)
from shalekv_client.operations import Method, attempt
from shalekv_client.policies import Destination
from shalekv_client.retry import NextAttempt, RetryPolicy, attempt_ms, may_repeat, next_attempt
from shalekv_client.routing.endpoints import Endpoint
from shalekv_client.routing.members import Members
from shalekv_client.routing.servers import Server

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

READ_SEARCH_MS = 500.0  # the search for the writer by a read that no reader answers, each round

# A server sends these reasons a little before the deadline, so that they arrive in time.
DEADLINE_REASONS = frozenset({"WRITE_TIMED_OUT", "DEADLINE_PASSED"})

# Refusals that a server makes before it checks the idempotency key.
_BEFORE_KEY_CHECK = (
    Overloaded,
    Stopping,
    DeadlinePassed,
    Unimplemented,
    NotTheWriter,
    NoWriter,
    NotSent,
)


async def first_answer(
    first: Coroutine[Any, Any, ReplyT],
    second: Callable[[], Coroutine[Any, Any, ReplyT] | None],
    hedge_s: float,
) -> ReplyT:
    """Return the result of `first`, or of `second`, which is started after `hedge_s`.

    The attempt that is not needed any more is cancelled. When both fail, raises the error of the
    one that failed last. If `first` fails before `hedge_s`, `second` is not started. `second` may
    return None: there is no other server.
    """
    tasks = {asyncio.create_task(first)}
    open_tasks = set(tasks)
    try:
        done, open_tasks = await asyncio.wait(tasks, timeout=hedge_s)
        if not done and (other := second()) is not None:
            open_tasks.add(asyncio.create_task(other))
            tasks |= open_tasks
        while True:
            if not done:
                done, open_tasks = await asyncio.wait(
                    open_tasks, return_when=asyncio.FIRST_COMPLETED
                )
            for task in done:
                if not isinstance(task.exception(), ShaleKVError):
                    return task.result()
            if not open_tasks:
                return next(iter(done)).result()
            done = set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class CallTarget:
    """The servers to which a call may go, and how often."""

    destination: Destination
    is_repeatable: bool  # even when the outcome of an attempt is unknown
    is_hedged: bool = False  # if hedging is configured in the client
    only: Endpoint | None = None  # the only server that may be asked; None: any
    replica_wait_ms: float | None = None  # for a first attempt at a reader; None: the client's


READ = CallTarget(Destination.BY_POLICY, is_repeatable=True, is_hedged=True)
READ_AT_WRITER = CallTarget(Destination.WRITER, is_repeatable=True)
WRITE = CallTarget(Destination.WRITER, is_repeatable=False)
REPEATABLE_WRITE = CallTarget(Destination.WRITER, is_repeatable=True)


@dataclass(slots=True)
class CallState:
    """The attempts of one call so far: which servers were tried, and with which errors.

    Once the outcome of an attempt is unknown, the outcome of the call is unknown until a later
    attempt settles it: a server that refuses a repeat before it has checked the idempotency key
    says nothing about the attempts before.
    """

    target: CallTarget
    destination: Destination  # of the target, by the policy of the client
    policy: RetryPolicy
    attempts: int = 1  # of a read by policy: rounds through all servers
    tried: set[Endpoint] = field(default_factory=set)  # of a read by policy, in this round
    has_searched: bool = False  # for the writer: a read by policy does so once in each round
    last: Endpoint | None = None  # where the last attempt has failed
    next_attempt: NextAttempt = NextAttempt.FINAL  # after the last failure
    unknown: OutcomeUnknown | None = None  # the last unknown outcome
    behind: ShaleKVError | None = None  # the last answer of a server that it is too far behind
    explicit: ShaleKVError | None = None  # the last error for which a server gave a reason

    def note(self, endpoint: Endpoint, error: ShaleKVError) -> None:
        """Note that an attempt has failed."""
        self.last = endpoint
        self.tried.add(endpoint)
        self.next_attempt = next_attempt(
            error, self.destination, is_repeatable=self.target.is_repeatable
        )
        if isinstance(error, OutcomeUnknown):
            self.unknown = error
        if error.reason:
            self.explicit = error
        if isinstance(error, TooStale | SeqNotReached):
            self.behind = error

    def final(self, error: ShaleKVError) -> tuple[ShaleKVError, ShaleKVError | None]:
        """Return the error to raise when `error` was the last one, and its cause."""
        is_silent = isinstance(error, DeadlineExceeded) and not error.reason
        explicit = self.explicit if is_silent else None
        if self.destination is Destination.BY_POLICY:
            found = None if error.reason else self.behind or explicit
            return (error, None) if found is None or found is error else (found, error)
        if self.unknown is not None and isinstance(error, _BEFORE_KEY_CHECK):
            return self.unknown, error
        if isinstance(explicit, OutcomeUnknown):
            return explicit, error
        return (error, None) if explicit is None else (_with_reason(error, explicit), error)

    def _is_over(self, error: ShaleKVError) -> bool:
        """Return True if a server answered at the deadline of the call, not of one attempt."""
        return error.reason in DEADLINE_REASONS and self.policy.attempt_timeout_ms is None

    def delay_ms(
        self, error: ShaleKVError, chance: float, left_ms: float, *, has_choice: bool
    ) -> float | None:
        """Return the delay before one more attempt, or round; None: no more is made."""
        if self.attempts >= self.policy.attempts_max or (not has_choice and self._is_over(error)):
            return None
        if not has_choice and not may_repeat(error, is_repeatable=self.target.is_repeatable):
            return None
        delay_ms = self.policy.backoff_ms(self.attempts, error, chance)
        self.attempts += 1
        self.tried.clear()
        self.has_searched = False
        return delay_ms if delay_ms < left_ms else None


def _with_reason(silence: ShaleKVError, explicit: ShaleKVError) -> ShaleKVError:
    """Return the timeout of the last attempt, with the message of an earlier error added."""
    details = silence.details
    message = f"{details.message}; before that: {explicit.details.message}"
    return DeadlineExceeded(replace(details, message=message))


class Fleet(Members):
    """Sends calls to the servers of one database. Belongs to one event loop."""

    async def unary(
        self,
        method: Callable[[Server], Method[RequestT, ReplyT]],
        request: RequestT,
        *,
        destination: Destination,
        is_repeatable: bool,
        timeout_ms: int,
    ) -> ReplyT:
        """Call `method` of a server with `request`, and return the reply. Raises as `run`."""

        async def send(server: Server, left_ms: float) -> ReplyT:
            reply: Any = await attempt(server.address, method(server), request, left_ms)
            server.note_header(reply.header)
            answer: ReplyT = reply
            return answer

        return await self.run(send, CallTarget(destination, is_repeatable), timeout_ms)

    async def run(
        self,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        target: CallTarget,
        timeout_ms: float,
    ) -> ReplyT:
        """Call `send` until it is answered or may not be repeated; return the reply.

        `send` makes one attempt, at the given server, within the given time in ms. Raises what
        `CallState.final` makes of the last error; `NoWriter` when the writer is needed and was not
        found.
        """
        self.check_open()
        deadline_ms = self._loop.time() * 1000.0 + timeout_ms
        sole = self.endpoints.sole
        if sole is None or (sole.role is None and self._must_ask(target.destination)):
            state = CallState(target, self._effective(target.destination), self._retry)
            return await self._try_until_done(send, state, deadline_ms, None)
        server = self._servers.of(sole)
        limit_ms = self._retry.attempt_timeout_ms
        try:  # nearly all calls end here, with their first attempt
            return await send(server, min(timeout_ms, limit_ms) if limit_ms else timeout_ms)
        except ShaleKVError as error:
            state = CallState(target, self._effective(target.destination), self._retry)
            state.note(server.endpoint, error)
            self.failed(server, error, state.destination)
            return await self._try_until_done(send, state, deadline_ms, error)

    async def _try_until_done(
        self,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        state: CallState,
        deadline_ms: float,
        error: ShaleKVError | None,
    ) -> ReplyT:
        """Make one more attempt, and others after it; `error` is that of the attempt before."""
        while True:
            if error is not None:
                delay_ms = await self._delay_before_next_ms(
                    state, error, self._left_ms(deadline_ms)
                )
                if delay_ms:
                    await asyncio.sleep(delay_ms / 1000.0)
                self.check_open()
            try:
                server = await self._next_server(state, self._left_ms(deadline_ms))
                return await self._attempt(server, send, state, deadline_ms)
            except ShaleKVError as failed:
                error = failed

    def _left_ms(self, deadline_ms: float) -> float:
        return deadline_ms - self._loop.time() * 1000.0

    async def _next_server(self, state: CallState, left_ms: float) -> Server:
        found = state.target.only or self._choose(state.destination, state.tried)
        if found is None:
            found = await self._search.find(left_ms / 1000.0)
            if found is None:
                raise self._no_writer()
        return self._servers.of(found)

    def _has_choice(self, state: CallState) -> bool:
        return state.target.only is None and self.endpoints.sole is None

    async def _attempt(
        self,
        server: Server,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        state: CallState,
        deadline_ms: float,
    ) -> ReplyT:
        hedge_ms = self._routing.hedge_ms
        is_hedged = state.target.is_hedged and state.destination is Destination.BY_POLICY
        if hedge_ms is None or not is_hedged or not self._has_choice(state):
            return await self._send_once(server, send, state, deadline_ms)

        def second() -> Any:
            other = self._choose(state.destination, state.tried | {server.endpoint})
            if other is None:
                return None
            return self._send_once(self._servers.of(other), send, state, deadline_ms)

        first = self._send_once(server, send, state, deadline_ms)
        return await first_answer(first, second, hedge_ms / 1000.0)

    async def _send_once(
        self,
        server: Server,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        state: CallState,
        deadline_ms: float,
    ) -> ReplyT:
        began_s = self._loop.time()
        left_ms = max(1.0, deadline_ms - began_s * 1000.0)
        if self._has_choice(state):
            left_ms = self._time_ms(server, state, left_ms)
        left_ms = min(left_ms, self._retry.attempt_timeout_ms or left_ms)
        is_read = state.destination is Destination.BY_POLICY
        try:
            reply = await send(server, left_ms)
        except ShaleKVError as raised:
            error = self.explained(server, raised)
            state.note(server.endpoint, error)
            self.failed(server, error, state.destination)
            if error is raised:
                raise
            raise error from raised
        except asyncio.CancelledError:
            if is_read:
                latency_ms = (self._loop.time() - began_s) * 1000.0
                self.endpoints.note_slower(server.endpoint, latency_ms)
            raise
        if is_read:
            self.endpoints.answered(server.endpoint, (self._loop.time() - began_s) * 1000.0)
        return reply

    def _time_ms(self, server: Server, state: CallState, left_ms: float) -> float:
        if state.destination is Destination.BY_POLICY and not server.is_writer:
            wait_ms = state.target.replica_wait_ms or self._routing.replica_wait_ms
            return attempt_ms(left_ms, wait_ms, state.attempts)
        if state.target.is_repeatable:
            return attempt_ms(left_ms, self._routing.writer_silence_ms, state.attempts)
        return left_ms

    async def _delay_before_next_ms(
        self, state: CallState, error: ShaleKVError, left_ms: float
    ) -> float:
        """Return the delay before the next attempt; raises the final error if there is none."""
        is_at_server = state.last is not None and not isinstance(error, NoWriter)
        has_choice = self._has_choice(state)
        if not is_at_server or (has_choice and state.next_attempt is NextAttempt.FINAL):
            self._raise_final(state, error)
        if has_choice and state.next_attempt is NextAttempt.OTHER:
            if state.destination is Destination.BY_POLICY:
                if await self._has_untried(state, left_ms):
                    return 0.0
            elif await self._has_another_writer(state, left_ms):
                return 0.0
        chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
        delay_ms = state.delay_ms(error, chance, left_ms, has_choice=has_choice)
        if delay_ms is None:
            self._raise_final(state, error)
        return delay_ms

    async def _has_untried(self, state: CallState, left_ms: float) -> bool:
        if left_ms <= 0:
            return False
        if self._choose(state.destination, state.tried) is None and not state.has_searched:
            state.has_searched = True
            if self.endpoints.writer is None:
                await self._search.find(min(left_ms, READ_SEARCH_MS) / 1000.0)
        return self._choose(state.destination, state.tried) is not None

    async def _has_another_writer(self, state: CallState, left_ms: float) -> bool:
        """Return whether the writer is now another server than the one that has failed."""
        found = self.endpoints.writer
        if found is None and left_ms > 0:
            found = await self._search.find(left_ms / 1000.0)
        if found is None:
            self._raise_final(state, self._no_writer())
        if found is state.last or state.attempts >= self._retry.attempts_max:
            return False
        state.attempts += 1
        return True

    def _raise_final(self, state: CallState, error: ShaleKVError) -> NoReturn:
        final, cause = state.final(error)
        if cause is None:
            raise final
        raise final from cause
