"""Sends calls to the servers of one database: to which one, and what is done when it fails.

For whoever adds calls beside those of `Client` (which has its fleet as `client.fleet`):

    reply = await fleet.unary(                  # with failover, within the deadline
        lambda server: server.admin.CreateSnapshot, request,
        destination=Destination.WRITER, is_repeatable=False, timeout_ms=timeout_ms)

    tried = set()                               # and for a stream, one attempt:
    server = await fleet.pick(Destination.BY_POLICY, timeout_ms, tried)
    call = server.kv.Watch(...)
    server.heard(reply.header)                  # of each reply
    fleet.failed(server, error, Destination.BY_POLICY)  # True: another server may do better; then
    tried.add(server.endpoint)                  # `pick` again

Errors are those of `shalekv_client.errors`; `server.address` is for their details. A call that is
cancelled under its caller while `server.is_dropped` was one to a server that is not the writer any
more: `explained` makes a ConnectionLost of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from shalekv_client.endpoints import Endpoint
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
from shalekv_client.members import Members
from shalekv_client.operations import Method, attempt
from shalekv_client.policies import Destination
from shalekv_client.retry import RetryPolicy, Verdict, attempt_ms, may_repeat, verdict
from shalekv_client.servers import Server

# --- hedging
# One question to a second server when the first one is slow: the first answer counts.


ReplyT = TypeVar("ReplyT")


async def first_answer(
    first: Coroutine[Any, Any, ReplyT],
    second: Callable[[], Coroutine[Any, Any, ReplyT] | None],
    hedge_s: float,
) -> ReplyT:
    """The result of `first`, or of `second`, which is begun when there is none after `hedge_s`.

    Whoever is not waited for any more is cancelled. Raises the error of the one that failed last
    when both fail; a `first` that fails in time is not hedged. `second` may return None: nobody
    else is there.
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


# --- trip
# One call on its way through servers and attempts, after its first attempt has failed.


# Told a little before the deadline, so that it arrives in time.
AT_THE_DEADLINE = frozenset({"WRITE_TIMED_OUT", "DEADLINE_PASSED"})

# Refusals that come before a server has looked at the idempotency key.
_AT_THE_DOOR = (
    Overloaded,
    Stopping,
    DeadlinePassed,
    Unimplemented,
    NotTheWriter,
    NoWriter,
    NotSent,
)


@dataclass(frozen=True, slots=True)
class Aim:
    """Where a call may go."""

    destination: Destination
    is_repeatable: bool  # although nobody knows what has become of an attempt
    is_hedged: bool = False  # as the client is set
    only: Endpoint | None = None  # the server that is asked, and no other
    replica_wait_ms: float | None = None  # of a first attempt at a reader; None: the client's


READ = Aim(Destination.BY_POLICY, is_repeatable=True, is_hedged=True)
READ_AT_WRITER = Aim(Destination.WRITER, is_repeatable=True)
WRITE = Aim(Destination.WRITER, is_repeatable=False)
REPEATABLE_WRITE = Aim(Destination.WRITER, is_repeatable=True)


@dataclass(slots=True)
class Trip:
    """What has become of the attempts of one call.

    Once the outcome of an attempt is unknown, the outcome of the call is unknown until a later
    attempt settles it: a server that turns a repeat away before it has looked at its key says
    nothing about the attempts before.
    """

    aim: Aim
    destination: Destination  # of the aim, by the policy of the client
    policy: RetryPolicy
    attempts: int = 1  # of a read by policy: rounds through all servers
    tried: set[Endpoint] = field(default_factory=set)  # of a read by policy, in this round
    has_searched: bool = False  # for the writer, as a read by policy does once in a round
    last: Endpoint | None = None  # where the last attempt has failed
    verdict: Verdict = Verdict.FINAL  # on that
    unknown: OutcomeUnknown | None = None
    behind: ShaleKVError | None = None  # a server answered that it is too far behind
    told: ShaleKVError | None = None  # the last error that a server gave a reason for

    def note(self, endpoint: Endpoint, error: ShaleKVError) -> None:
        """An attempt has failed."""
        self.last = endpoint
        self.tried.add(endpoint)
        self.verdict = verdict(error, self.destination, is_repeatable=self.aim.is_repeatable)
        if isinstance(error, OutcomeUnknown):
            self.unknown = error
        if error.reason:
            self.told = error
        if isinstance(error, TooStale | SeqNotReached):
            self.behind = error

    def final(self, error: ShaleKVError) -> tuple[ShaleKVError, ShaleKVError | None]:
        """What to raise when `error` was the last, and its cause."""
        is_silent = isinstance(error, DeadlineExceeded) and not error.reason
        told = self.told if is_silent else None
        if self.destination is Destination.BY_POLICY:
            found = None if error.reason else self.behind or told
            return (error, None) if found is None or found is error else (found, error)
        if self.unknown is not None and isinstance(error, _AT_THE_DOOR):
            return self.unknown, error
        if isinstance(told, OutcomeUnknown):
            return told, error
        return (error, None) if told is None else (_with_reason(error, told), error)

    def _is_over(self, error: ShaleKVError) -> bool:
        """Return True if a server answered at the deadline of the call, not of one attempt."""
        return error.reason in AT_THE_DEADLINE and self.policy.attempt_timeout_ms is None

    def delay_ms(
        self, error: ShaleKVError, chance: float, left_ms: float, *, has_choice: bool
    ) -> float | None:
        """How long to wait before one more attempt, or round; None: there is none."""
        if self.attempts >= self.policy.attempts_max or (not has_choice and self._is_over(error)):
            return None
        if not has_choice and not may_repeat(error, is_repeatable=self.aim.is_repeatable):
            return None
        delay_ms = self.policy.backoff_ms(self.attempts, error, chance)
        self.attempts += 1
        self.tried.clear()
        self.has_searched = False
        return delay_ms if delay_ms < left_ms else None


def _with_reason(silence: ShaleKVError, told: ShaleKVError) -> ShaleKVError:
    """The silence of the last attempt, with what a server told of an earlier one."""
    details = silence.details
    message = f"{details.message}; before that: {told.details.message}"
    return DeadlineExceeded(replace(details, message=message))


# --- fleet


RequestT = TypeVar("RequestT")

READ_SEARCH_MS = 500.0  # for a read that no reader answers to find the writer, in each round


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
        """The reply to `request` by `method` of whichever server it takes; raises as `run`."""

        async def send(server: Server, left_ms: float) -> ReplyT:
            reply: Any = await attempt(server.address, method(server), request, left_ms)
            server.heard(reply.header)
            answer: ReplyT = reply
            return answer

        return await self.run(send, Aim(destination, is_repeatable), timeout_ms)

    async def run(
        self,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        aim: Aim,
        timeout_ms: float,
    ) -> ReplyT:
        """The reply of `send`, which makes one attempt, given a server and a time in ms.

        Called until it is answered or may not be repeated. Raises what the last attempt raised,
        but for `Trip.final`; `NoWriter` when the writer is needed and was not found.
        """
        self.check_open()
        deadline_ms = self._loop.time() * 1000.0 + timeout_ms
        sole = self.endpoints.sole
        if sole is None or (sole.role is None and self._must_ask(aim.destination)):
            trip = Trip(aim, self._effective(aim.destination), self._retry)
            return await self._travel(send, trip, deadline_ms, None)
        server = self._servers.of(sole)
        limit_ms = self._retry.attempt_timeout_ms
        try:  # for nearly all calls there is no more to it
            return await send(server, min(timeout_ms, limit_ms) if limit_ms else timeout_ms)
        except ShaleKVError as error:
            trip = Trip(aim, self._effective(aim.destination), self._retry)
            trip.note(server.endpoint, error)
            self.failed(server, error, trip.destination)
            return await self._travel(send, trip, deadline_ms, error)

    async def _travel(
        self,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        trip: Trip,
        deadline_ms: float,
        error: ShaleKVError | None,
    ) -> ReplyT:
        """The reply of one more attempt, or of those after it; `error` is that of the last."""
        while True:
            if error is not None:
                delay_ms = await self._after(trip, error, self._left_ms(deadline_ms))
                if delay_ms:
                    await asyncio.sleep(delay_ms / 1000.0)
                self.check_open()
            try:
                server = await self._next(trip, self._left_ms(deadline_ms))
                return await self._attempt(server, send, trip, deadline_ms)
            except ShaleKVError as failed:
                error = failed

    def _left_ms(self, deadline_ms: float) -> float:
        return deadline_ms - self._loop.time() * 1000.0

    async def _next(self, trip: Trip, left_ms: float) -> Server:
        found = trip.aim.only or self._choose(trip.destination, trip.tried)
        if found is None:
            found = await self._search.find(left_ms / 1000.0)
            if found is None:
                raise self._no_writer()
        return self._servers.of(found)

    def _has_choice(self, trip: Trip) -> bool:
        return trip.aim.only is None and self.endpoints.sole is None

    async def _attempt(
        self,
        server: Server,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        trip: Trip,
        deadline_ms: float,
    ) -> ReplyT:
        hedge_ms = self._routing.hedge_ms
        is_hedged = trip.aim.is_hedged and trip.destination is Destination.BY_POLICY
        if hedge_ms is None or not is_hedged or not self._has_choice(trip):
            return await self._one(server, send, trip, deadline_ms)

        def second() -> Any:
            other = self._choose(trip.destination, trip.tried | {server.endpoint})
            if other is None:
                return None
            return self._one(self._servers.of(other), send, trip, deadline_ms)

        first = self._one(server, send, trip, deadline_ms)
        return await first_answer(first, second, hedge_ms / 1000.0)

    async def _one(
        self,
        server: Server,
        send: Callable[[Server, float], Awaitable[ReplyT]],
        trip: Trip,
        deadline_ms: float,
    ) -> ReplyT:
        began_s = self._loop.time()
        left_ms = max(1.0, deadline_ms - began_s * 1000.0)
        if self._has_choice(trip):
            left_ms = self._time_ms(server, trip, left_ms)
        left_ms = min(left_ms, self._retry.attempt_timeout_ms or left_ms)
        is_read = trip.destination is Destination.BY_POLICY
        try:
            reply = await send(server, left_ms)
        except ShaleKVError as raised:
            error = self.explained(server, raised)
            trip.note(server.endpoint, error)
            self.failed(server, error, trip.destination)
            if error is raised:
                raise
            raise error from raised
        except asyncio.CancelledError:
            if is_read:
                latency_ms = (self._loop.time() - began_s) * 1000.0
                self.endpoints.outrun(server.endpoint, latency_ms)
            raise
        if is_read:
            self.endpoints.answered(server.endpoint, (self._loop.time() - began_s) * 1000.0)
        return reply

    def _time_ms(self, server: Server, trip: Trip, left_ms: float) -> float:
        if trip.destination is Destination.BY_POLICY and not server.is_writer:
            wait_ms = trip.aim.replica_wait_ms or self._routing.replica_wait_ms
            return attempt_ms(left_ms, wait_ms, trip.attempts)
        if trip.aim.is_repeatable:
            return attempt_ms(left_ms, self._routing.writer_silence_ms, trip.attempts)
        return left_ms

    async def _after(self, trip: Trip, error: ShaleKVError, left_ms: float) -> float:
        """How long to wait before the next attempt; raises when there is none."""
        is_at_server = trip.last is not None and not isinstance(error, NoWriter)
        has_choice = self._has_choice(trip)
        if not is_at_server or (has_choice and trip.verdict is Verdict.FINAL):
            self._give_up(trip, error)
        if has_choice and trip.verdict is Verdict.OTHER:
            if trip.destination is Destination.BY_POLICY:
                if await self._has_untried(trip, left_ms):
                    return 0.0
            elif await self._has_another_writer(trip, left_ms):
                return 0.0
        chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
        delay_ms = trip.delay_ms(error, chance, left_ms, has_choice=has_choice)
        if delay_ms is None:
            self._give_up(trip, error)
        return delay_ms

    async def _has_untried(self, trip: Trip, left_ms: float) -> bool:
        if left_ms <= 0:
            return False
        if self._choose(trip.destination, trip.tried) is None and not trip.has_searched:
            trip.has_searched = True
            if self.endpoints.writer is None:
                await self._search.find(min(left_ms, READ_SEARCH_MS) / 1000.0)
        return self._choose(trip.destination, trip.tried) is not None

    async def _has_another_writer(self, trip: Trip, left_ms: float) -> bool:
        """Whether the writer is now another server than the one that has failed."""
        found = self.endpoints.writer
        if found is None and left_ms > 0:
            found = await self._search.find(left_ms / 1000.0)
        if found is None:
            self._give_up(trip, self._no_writer())
        if found is trip.last or trip.attempts >= self._retry.attempts_max:
            return False
        trip.attempts += 1
        return True

    def _give_up(self, trip: Trip, error: ShaleKVError) -> NoReturn:
        final, cause = trip.final(error)
        if cause is None:
            raise final
        raise final from cause
