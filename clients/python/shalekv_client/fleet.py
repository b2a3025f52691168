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
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_client.cancellation import client_closed
from shalekv_client.channel import checked_address
from shalekv_client.endpoints import Endpoint, Endpoints
from shalekv_client.errors import (
    Abandoned,
    ClientClosed,
    ConditionFailed,
    ConnectionLost,
    ErrorDetails,
    Fenced,
    NotSent,
    NotTheWriter,
    NoWriter,
    ShaleKVError,
)
from shalekv_client.freshness import Freshness
from shalekv_client.hedging import first_answer
from shalekv_client.levels import Role
from shalekv_client.policies import Destination, ReadPolicy, Routing
from shalekv_client.retry import RetryPolicy
from shalekv_client.servers import Connecting, Server, Servers
from shalekv_client.trip import Aim, Trip
from shalekv_client.unary import Method, attempt
from shalekv_client.verdicts import Verdict, attempt_ms, verdict
from shalekv_client.writer_search import WriterSearch

ReplyT = TypeVar("ReplyT")
RequestT = TypeVar("RequestT")

PROBE_MS = 1_000  # for a server to tell its role
READ_SEARCH_MS = 500.0  # for a read that no reader answers to find the writer, in each round


class Fleet:
    """The servers of one database. Belongs to one event loop."""

    def __init__(
        self, addresses: tuple[str, ...], *, how: Connecting, routing: Routing, retry: RetryPolicy
    ) -> None:
        """Connects to `addresses` at the first calls. Needs a running event loop."""
        self.address = addresses[0]
        self.freshness = Freshness()
        self.freshness.is_bound = len(addresses) > 1
        nearest_first = routing.reads is ReadPolicy.NEAREST
        self.endpoints = Endpoints(addresses, nearest_first=nearest_first)
        self._servers = Servers(self.endpoints, self.freshness, how)
        self._routing = routing
        self._retry = retry
        self._search = WriterSearch(self.endpoints, self._ask, self._servers.drop)
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    async def aclose(self) -> None:
        """Close all connections; calls under way fail."""
        self._is_closed = True
        await self._search.aclose()
        await self._servers.aclose()

    def check_open(self) -> None:
        """Raises `ClientClosed`."""
        if self._is_closed:
            raise client_closed(self.address)

    def set_routing(self, routing: Routing) -> None:
        """Divide calls so from now on; what reads are for is decided when the fleet is made."""
        self._routing = routing

    def at(self, endpoint: Endpoint) -> Server:
        """The connection to one of the `endpoints`."""
        return self._servers.of(endpoint)

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

    async def pick(
        self, destination: Destination, timeout_ms: float, tried: Collection[Endpoint] = ()
    ) -> Server:
        """A server to begin a call at, beside those that were `tried`.

        Raises `NoWriter` when none is left and the writer is not found in that time.
        """
        self.check_open()
        found = self._choose(self._effective(destination), tried)
        if found is None:
            found = await self._search.find(timeout_ms / 1000.0)
            if found is None or found in tried:
                raise self._no_writer()
        return self._servers.of(found)

    def endpoint_at(self, address: str) -> Endpoint | None:
        """What is at an address, if it is one of the fleet."""
        return self.endpoints.get(address)

    def failed(self, server: Server, error: ShaleKVError, destination: Destination) -> bool:
        """Learn from a failed attempt; returns whether one at another server may do better."""
        endpoints, endpoint = self.endpoints, server.endpoint
        if isinstance(error, ConditionFailed):
            self.freshness.seen(error.found_seq)
        if isinstance(error, NotTheWriter):
            endpoints.is_reader(endpoint)
            self._told(error.writer_address)
        if isinstance(error, Fenced):
            endpoints.overtaken(error.newer_epoch or 0)
        destination = self._effective(destination)
        if verdict(error, destination, is_repeatable=True) is not Verdict.OTHER:
            return False
        if endpoints.sole is not None:
            return False
        if not isinstance(error, NotTheWriter):  # which is no reason not to read there
            endpoints.failed(endpoint, self._loop.time())
        if destination is Destination.WRITER:
            endpoints.doubt(endpoint)
        return True

    def explained(self, server: Server, error: ShaleKVError) -> ShaleKVError:
        """`error`, or what it means when it came from dropping the server under a call."""
        if not server.is_dropped or self._is_closed:
            return error
        if isinstance(error, Abandoned):
            details = ErrorDetails(server.address, "UNAVAILABLE", "it is not the writer any more")
            return ConnectionLost(details)
        if isinstance(error, ClientClosed):
            details = ErrorDetails(server.address, "UNAVAILABLE", "it is not the writer any more")
            return NotSent(details)
        return error

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

    def _choose(self, destination: Destination, tried: Collection[Endpoint]) -> Endpoint | None:
        sole = self.endpoints.sole
        if sole is not None:
            return None if sole.role is None and self._must_ask(destination) else sole
        chance = random.random()  # noqa: S311 (it spreads reads; nothing is kept secret)
        is_writer = destination is Destination.WRITER
        return self.endpoints.choose(
            destination, self._loop.time(), chance, () if is_writer else tried
        )

    def _must_ask(self, destination: Destination) -> bool:
        """Whether a server is asked for role and database before it is believed to be the writer.

        Not when it is the only one, and nothing says which database is meant.
        """
        if self._effective(destination) is not Destination.WRITER:
            return False
        return self.freshness.is_bound or self._routing.reads is ReadPolicy.WRITER

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

    def _effective(self, destination: Destination) -> Destination:
        if self._routing.reads is ReadPolicy.WRITER:
            return Destination.WRITER
        return destination

    async def _ask(self, endpoint: Endpoint, look_again: bool) -> str:  # noqa: FBT001 (passed on)
        server = self._servers.of(endpoint)
        if look_again and endpoint.role is Role.READER:
            # An idle reader looks for news, and so for another writer, every few seconds; one that
            # is asked for a state of this moment looks at once. The answer does not matter.
            header = kv_pb2.RequestHeader(max_staleness_ms=1)
            with suppress(ShaleKVError):
                news = kv_pb2.GetRequest(header=header, key=b"\0")
                await attempt(server.address, server.kv.Get, news, PROBE_MS)
        request = admin_pb2.StatusRequest()
        reply = await attempt(server.address, server.admin.Status, request, PROBE_MS)
        server.heard(reply.header)
        return self._told(reply.reader.writer_address)

    def _told(self, address: str) -> str:
        """Learn where the writer is said to be; returns it, or nothing if it can't be."""
        try:
            checked_address(address)
        except ValueError:
            return ""
        self.endpoints.told(address)
        return address

    def _no_writer(self) -> NoWriter:
        addresses = ", ".join(endpoint.address for endpoint in self.endpoints)
        message = f"none of {addresses} is the writer, or knows one that answers"
        return NoWriter(ErrorDetails(self.address, "UNAVAILABLE", message))
