"""The servers of one database: what is known of them, whom to ask, and what failures teach."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_client.closing import client_closed
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
    WrongDatabase,
)
from shalekv_client.operations import attempt
from shalekv_client.policies import Destination, ReadPolicy, Role, Routing
from shalekv_client.retry import RetryPolicy, Verdict, verdict
from shalekv_client.servers import Connecting, Server, Servers, is_address
from shalekv_client.tokens import Freshness

# --- writer_search
# Finding the writer: every server is asked for its role, and for who the writer is.
#
# Readers learn from the manifest where a new writer is, some time after it has begun. Until
# somebody answers as the writer, under an epoch that nobody knows to be over, all are asked again
# and again. All calls that wait for the writer wait for the same search.


HOPS_MAX = 4  # addresses that are only told of and are asked in one round
DOUBTED_PAUSE_S = 0.03
PAUSE_INITIAL_S = 0.02
PAUSE_MAX_S = 0.3


class WriterSearch:
    """Searches as long as somebody waits."""

    def __init__(
        self,
        endpoints: Endpoints,
        ask: Callable[[Endpoint, bool], Awaitable[str]],
        drop: Callable[[list[Endpoint]], None],
    ) -> None:
        """`ask` lets `endpoints` know what a server answers, and returns the address of the writer
        as the server tells it, or nothing; if it is told so, the server looks for news before.
        `drop` closes connections that are needed no more.
        """
        self._endpoints = endpoints
        self._ask = ask
        self._drop = drop
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._foreign: WrongDatabase | None = None

    async def find(self, within_s: float) -> Endpoint | None:
        """The writer; None: it was not found in that time.

        Raises `WrongDatabase` when an address that the user gave is that of another database.
        """
        task = self._task
        if task is None or task.done():
            task = self._task = asyncio.create_task(self._search())
        self._waiting += 1
        try:
            await asyncio.wait([task], timeout=within_s)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._end()
        if task.done() and not task.cancelled():
            task.result()  # raises what nobody expects
        if self._endpoints.writer is None and self._foreign is not None:
            raise self._foreign.again()
        return self._endpoints.writer

    async def aclose(self) -> None:
        """Search no more."""
        self._end()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _search(self) -> None:
        pause_s = PAUSE_INITIAL_S
        is_again = False
        while True:
            self._foreign = None
            await self._round(is_again=is_again)
            is_again = True
            self._drop(self._endpoints.forget_told())
            if self._endpoints.writer is not None or self._foreign is not None:
                return
            chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
            await asyncio.sleep(pause_s * (0.5 + 0.5 * chance))
            pause_s = min(PAUSE_MAX_S, pause_s * 2.0)

    async def _round(self, *, is_again: bool) -> None:
        """Ask everybody, and whom they name, until one is the writer."""
        endpoints = self._endpoints
        asked: set[Endpoint] = set()
        tasks: set[asyncio.Task[str]] = set()

        def ask(endpoint: Endpoint) -> None:
            if endpoint not in asked:
                asked.add(endpoint)
                tasks.add(asyncio.create_task(self._told_by(endpoint, is_again)))

        for endpoint in endpoints:
            ask(endpoint)
        hops_left = HOPS_MAX
        try:
            while tasks and endpoints.writer is None:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks -= done
                for address in {task.result() for task in done} - {""}:
                    if endpoints.get(address) is not None or hops_left:
                        hops_left -= endpoints.get(address) is None
                        ask(endpoints.told(address))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _told_by(self, endpoint: Endpoint, is_again: bool) -> str:  # noqa: FBT001 (passed on)
        if endpoint.avoid_until_s > asyncio.get_running_loop().time():
            await asyncio.sleep(DOUBTED_PAUSE_S)  # who has just failed has not the first word
        try:
            return await self._ask(endpoint, is_again)
        except WrongDatabase as error:
            if endpoint.is_listed:
                self._foreign = error
        except ShaleKVError:
            pass  # it says nothing: who else does?
        return ""


# --- members


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
