"""The servers of one database: their connections, the choice of one, and the search for the writer.

`Members` is the base of `shalekv_client.routing.fleet.Fleet`, which sends calls to the servers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_client.closing import client_closed
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
from shalekv_client.retry import NextAttempt, RetryPolicy, next_attempt
from shalekv_client.routing.endpoints import Endpoint, Endpoints
from shalekv_client.routing.servers import ConnectionOptions, Server, Servers, is_address
from shalekv_client.routing.tokens import Freshness

HOPS_MAX = 4  # unknown addresses, reported by servers, that are asked in one round
DOUBTED_PAUSE_S = 0.03  # before a server that failed a moment ago is asked
PAUSE_INITIAL_S = 0.02
PAUSE_MAX_S = 0.3
PROBE_MS = 1_000  # the timeout of a question for a server's role


class WriterSearch:
    """Searches for the writer as long as a call waits for it.

    Every server is asked for its role and for the address of the writer. Readers learn from the
    manifest where a new writer is, some time after it has begun. So all servers are asked again and
    again, until one answers as the writer under an epoch that is not known to be over. All calls
    that wait for the writer share one search.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        ask: Callable[[Endpoint, bool], Awaitable[str]],
        drop: Callable[[list[Endpoint]], None],
    ) -> None:
        """Create a search that is not running.

        `ask(endpoint, refresh)` notes the answer of a server in `endpoints` and returns the address
        of the writer that the server reports, or an empty string. With `refresh` the server reads
        the newest state before it answers. `drop` closes connections that are not needed any more.
        """
        self._endpoints = endpoints
        self._ask = ask
        self._drop = drop
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._wrong_database: WrongDatabase | None = None

    async def find(self, within_s: float) -> Endpoint | None:
        """Wait for the writer and return it; None: it was not found within `within_s`.

        Raises `WrongDatabase` when an address that the user gave belongs to another database.
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
            task.result()  # raises unexpected errors
        if self._endpoints.writer is None and self._wrong_database is not None:
            raise self._wrong_database.again()
        return self._endpoints.writer

    async def aclose(self) -> None:
        """End the search."""
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
        refresh = False
        while True:
            self._wrong_database = None
            await self._round(refresh=refresh)
            refresh = True
            self._drop(self._endpoints.drop_reported())
            if self._endpoints.writer is not None or self._wrong_database is not None:
                return
            chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
            await asyncio.sleep(pause_s * (0.5 + 0.5 * chance))
            pause_s = min(PAUSE_MAX_S, pause_s * 2.0)

    async def _round(self, *, refresh: bool) -> None:
        """Ask all servers, and those whose addresses they report, until one is the writer."""
        endpoints = self._endpoints
        asked: set[Endpoint] = set()
        tasks: set[asyncio.Task[str]] = set()

        def ask(endpoint: Endpoint) -> None:
            if endpoint not in asked:
                asked.add(endpoint)
                tasks.add(asyncio.create_task(self._ask_one(endpoint, refresh)))

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
                        ask(endpoints.add_reported(address))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_one(self, endpoint: Endpoint, refresh: bool) -> str:  # noqa: FBT001 (passed on)
        if endpoint.avoid_until_s > asyncio.get_running_loop().time():
            await asyncio.sleep(DOUBTED_PAUSE_S)  # others may answer first
        try:
            return await self._ask(endpoint, refresh)
        except WrongDatabase as error:
            if endpoint.is_listed:
                self._wrong_database = error
        except ShaleKVError:
            pass  # no answer: the other servers are asked as well
        return ""


class Members:
    """The servers of one database and the connections to them. Belongs to one event loop."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        *,
        how: ConnectionOptions,
        routing: Routing,
        retry: RetryPolicy,
    ) -> None:
        """Create unconnected members; calls connect them. Needs a running event loop."""
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
        """Raise `ClientClosed` if the client is closed."""
        if self._is_closed:
            raise client_closed(self.address)

    def at(self, endpoint: Endpoint) -> Server:
        """Return the connection to one of the `endpoints`."""
        return self._servers.of(endpoint)

    def set_routing(self, routing: Routing) -> None:
        """Use `routing` from now on, except whether reads prefer the nearest server.

        That is decided when the fleet is created.
        """
        self._routing = routing

    def endpoint_at(self, address: str) -> Endpoint | None:
        """Return the endpoint with this address; None: the fleet has none."""
        return self.endpoints.get(address)

    async def pick(
        self, destination: Destination, timeout_ms: float, tried: Collection[Endpoint] = ()
    ) -> Server:
        """Return a server for a call, none of those that were `tried`.

        Raises `NoWriter` when none is left and the writer is not found within `timeout_ms`.
        """
        self.check_open()
        found = self._choose(self._effective(destination), tried)
        if found is None:
            found = await self._search.find(timeout_ms / 1000.0)
            if found is None or found in tried:
                raise self._no_writer()
        return self._servers.of(found)

    def failed(self, server: Server, error: ShaleKVError, destination: Destination) -> bool:
        """Note a failed attempt; return whether an attempt at another server may succeed."""
        endpoints, endpoint = self.endpoints, server.endpoint
        if isinstance(error, ConditionFailed):
            self.freshness.seen(error.found_seq)
        if isinstance(error, NotTheWriter):
            endpoints.note_reader(endpoint)
            if is_address(error.writer_address):
                endpoints.add_reported(error.writer_address)
        if isinstance(error, Fenced):
            endpoints.note_newer_epoch(error.newer_epoch or 0)
        destination = self._effective(destination)
        if next_attempt(error, destination, is_repeatable=True) is not NextAttempt.OTHER:
            return False
        if endpoints.sole is not None:
            return False
        if not isinstance(error, NotTheWriter):  # a server that is not the writer can be read
            is_behind = isinstance(error, SeqNotReached | DeadlineExceeded)
            wanted_seq = self.freshness.seq if is_behind else 0
            endpoints.failed(endpoint, self._loop.time(), wanted_seq)
        if destination is Destination.WRITER:
            endpoints.doubt(endpoint)
        return True

    def explained(self, server: Server, error: ShaleKVError) -> ShaleKVError:
        """Return `error`, or what it means if it came from dropping the server during a call."""
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
            self._probe_failing()
        return self.endpoints.choose(destination, chance, () if is_writer else tried)

    def _must_ask(self, destination: Destination) -> bool:
        """Return whether a sole server is asked for its role and database before it is called.

        Only calls to the writer need that, and only when the client is bound to a database or its
        reads go to the writer.
        """
        if self._effective(destination) is not Destination.WRITER:
            return False
        return self.freshness.is_bound or self._routing.reads is ReadPolicy.WRITER

    def _probe_failing(self) -> None:
        """Ask failing servers for their status once the time to avoid them is over."""
        now_s = self._loop.time()
        for endpoint in self.endpoints.failing:
            if endpoint.avoid_until_s <= now_s:
                endpoint.avoid_until_s = now_s + PROBE_MS / 1000.0
                task = self._loop.create_task(self._probe(endpoint))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _probe(self, endpoint: Endpoint) -> None:
        with suppress(ShaleKVError):
            await self._ask(endpoint, refresh=False)
            if endpoint.seq >= endpoint.wanted_seq:
                self.endpoints.serves(endpoint)
                return
        self.endpoints.failed(endpoint, self._loop.time())

    def _effective(self, destination: Destination) -> Destination:
        if self._routing.reads is ReadPolicy.WRITER:
            return Destination.WRITER
        return destination

    async def _ask(self, endpoint: Endpoint, refresh: bool) -> str:  # noqa: FBT001 (passed on)
        server = self._servers.of(endpoint)
        if refresh and endpoint.role is Role.READER:
            # An idle reader polls the store, and so learns of another writer, every few seconds. A
            # read of the newest state makes it poll at once. The answer does not matter.
            header = kv_pb2.RequestHeader(max_staleness_ms=1)
            with suppress(ShaleKVError):
                newest = kv_pb2.GetRequest(header=header, key=b"\0")
                await attempt(server.address, server.kv.Get, newest, PROBE_MS)
        request = admin_pb2.StatusRequest()
        reply = await attempt(server.address, server.admin.Status, request, PROBE_MS)
        server.note_header(reply.header)
        endpoint.seq = reply.header.seq
        writer_address = reply.reader.writer_address
        return writer_address if is_address(writer_address) else ""

    def _no_writer(self) -> NoWriter:
        addresses = ", ".join(endpoint.address for endpoint in self.endpoints)
        message = f"none of {addresses} is the writer, or knows one that answers"
        if len(self.endpoints) == 1:
            message = "this server is not the writer, and knows none that answers"
        return NoWriter(ErrorDetails(self.address, "UNAVAILABLE", message))
