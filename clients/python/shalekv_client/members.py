"""The servers of one database: what is known of them, whom to ask, and what failures teach."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from contextlib import suppress

from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_client.cancellation import client_closed
from shalekv_client.channel import is_address
from shalekv_client.endpoints import Endpoint, Endpoints
from shalekv_client.errors import (
    Abandoned,
    ClientClosed,
    ConditionFailed,
    ConnectionLost,
    DeadlineExceeded,
    ErrorDetails,
    Fenced,
    NotSent,
    NotTheWriter,
    NoWriter,
    SeqNotReached,
    ShaleKVError,
)
from shalekv_client.freshness import Freshness
from shalekv_client.levels import Role
from shalekv_client.policies import Destination, ReadPolicy, Routing
from shalekv_client.retry import RetryPolicy
from shalekv_client.servers import Connecting, Server, Servers
from shalekv_client.unary import attempt
from shalekv_client.verdicts import Verdict, verdict
from shalekv_client.writer_search import WriterSearch

PROBE_MS = 1_000  # for a server to tell its role


class Members:
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def aclose(self) -> None:
        """Close all connections; calls under way fail."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._search.aclose()
        await self._servers.aclose()

    def check_open(self) -> None:
        """Raises `ClientClosed`."""
        if self._is_closed:
            raise client_closed(self.address)

    def at(self, endpoint: Endpoint) -> Server:
        """The connection to one of the `endpoints`."""
        return self._servers.of(endpoint)

    def set_routing(self, routing: Routing) -> None:
        """Divide calls so from now on; what reads are for is decided when the fleet is made."""
        self._routing = routing

    def endpoint_at(self, address: str) -> Endpoint | None:
        """What is at an address, if it is one of the fleet."""
        return self.endpoints.get(address)

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

    def failed(self, server: Server, error: ShaleKVError, destination: Destination) -> bool:
        """Learn from a failed attempt; returns whether one at another server may do better."""
        endpoints, endpoint = self.endpoints, server.endpoint
        if isinstance(error, ConditionFailed):
            self.freshness.seen(error.found_seq)
        if isinstance(error, NotTheWriter):
            endpoints.is_reader(endpoint)
            if is_address(error.writer_address):
                endpoints.told(error.writer_address)
        if isinstance(error, Fenced):
            endpoints.overtaken(error.newer_epoch or 0)
        destination = self._effective(destination)
        if verdict(error, destination, is_repeatable=True) is not Verdict.OTHER:
            return False
        if endpoints.sole is not None:
            return False
        if not isinstance(error, NotTheWriter):  # which is no reason not to read there
            is_behind = isinstance(error, SeqNotReached | DeadlineExceeded)
            wanted_seq = self.freshness.seq if is_behind else 0
            endpoints.failed(endpoint, self._loop.time(), wanted_seq)
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

    def _choose(self, destination: Destination, tried: Collection[Endpoint]) -> Endpoint | None:
        sole = self.endpoints.sole
        if sole is not None:
            return None if sole.role is None and self._must_ask(destination) else sole
        chance = random.random()  # noqa: S311 (it spreads reads; nothing is kept secret)
        is_writer = destination is Destination.WRITER
        if self.endpoints.failing and not is_writer:
            self._look_after_failing()
        return self.endpoints.choose(destination, chance, () if is_writer else tried)

    def _must_ask(self, destination: Destination) -> bool:
        """Whether a server is asked for role and database before it is believed to be the writer.

        Not when it is the only one, and nothing says which database is meant.
        """
        if self._effective(destination) is not Destination.WRITER:
            return False
        return self.freshness.is_bound or self._routing.reads is ReadPolicy.WRITER

    def _look_after_failing(self) -> None:
        """Ask those for their status that were passed over for long enough."""
        now_s = self._loop.time()
        for endpoint in self.endpoints.failing:
            if endpoint.avoid_until_s <= now_s:
                endpoint.avoid_until_s = now_s + PROBE_MS / 1000.0
                task = self._loop.create_task(self._look_after(endpoint))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _look_after(self, endpoint: Endpoint) -> None:
        with suppress(ShaleKVError):
            await self._ask(endpoint, look_again=False)
            if endpoint.seq >= endpoint.wanted_seq:
                self.endpoints.serves(endpoint)
                return
        self.endpoints.failed(endpoint, self._loop.time())

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
        endpoint.seq = reply.header.seq
        told = reply.reader.writer_address
        return told if is_address(told) else ""

    def _no_writer(self) -> NoWriter:
        addresses = ", ".join(endpoint.address for endpoint in self.endpoints)
        message = f"none of {addresses} is the writer, or knows one that answers"
        if len(self.endpoints) == 1:
            message = "this server is not the writer, and knows none that answers"
        return NoWriter(ErrorDetails(self.address, "UNAVAILABLE", message))
