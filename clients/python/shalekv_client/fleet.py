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
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from shalekv_client.errors import NoWriter, ShaleKVError
from shalekv_client.hedging import first_answer
from shalekv_client.members import Members
from shalekv_client.policies import Destination
from shalekv_client.servers import Server
from shalekv_client.trip import Aim, Trip
from shalekv_client.unary import Method, attempt
from shalekv_client.verdicts import Verdict, attempt_ms

ReplyT = TypeVar("ReplyT")
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
