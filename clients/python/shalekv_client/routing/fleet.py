"""Sends calls to the servers of one database, with retries, failover and hedging.

`Fleet.run` makes the attempts of one call, and `retry.CallState` has their outcomes. To add calls
beside those of `Client`, use its fleet, `client.fleet`:

    method = Method("/shalekv.v1.Admin/CreateSnapshot", CreateSnapshotRequest, CreateSnapshotReply)
    reply = await fleet.unary(                  # with failover, within the deadline
        method, request,
        destination=Destination.WRITER, is_repeatable=False, timeout_ms=timeout_ms)

    tried = set()                               # a stream, one attempt at a time:
    server = await fleet.pick(Destination.BY_POLICY, timeout_ms, tried)
    call = server.channel.stream("/shalekv.v1.KV/Watch")
    server.note_header(reply.header)            # for each reply
    fleet.failed(server, error, Destination.BY_POLICY)  # True: another server may succeed; then
    tried.add(server.endpoint)                  # `pick` again

Errors are those of `shalekv_client.errors`; `server.address` is for their details. When a call
fails because the client has dropped its server (`server.is_dropped`), which is not the writer any
more, `explained` returns the ConnectionLost or NotSent to raise instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from google.protobuf.message import Message

from shalekv.v1 import kv_pb2
from shalekv_client.closing import abandoned, client_closed
from shalekv_client.errors import (
    Abandoned,
    Cancelled,
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
    Unauthenticated,
)
from shalekv_client.operations import ADMIN, GET, Method, attempt
from shalekv_client.policies import Destination, ReadPolicy, Role
from shalekv_client.routing.addresses import is_address
from shalekv_client.routing.call_names import REQUEST_ID_HERE, metadata_here
from shalekv_client.routing.endpoints import Endpoint, Endpoints
from shalekv_client.routing.retry import (
    CallState,
    CallTarget,
    NextAttempt,
    RetryPolicy,
    attempt_ms,
    next_attempt,
)
from shalekv_client.routing.servers import ConnectionOptions, Server, Servers
from shalekv_client.routing.spans import begin_span
from shalekv_client.routing.tokens import Freshness
from shalekv_client.routing.writer_search import WriterSearch
from shalekv_wire.status import Metadata

if TYPE_CHECKING:
    from shalekv.v1 import admin_pb2
    from shalekv_client.routing.access_token import AccessToken
    from shalekv_wire.calls import Channel

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
ResultT = TypeVar("ResultT")

PROBE_MS = 1_000  # the timeout of a question for a server's role
UNNAMED: Metadata = ()  # of such a question, which may be asked for several calls
READ_SEARCH_MS = 500.0  # the search for the writer by a read that no reader answers, each round
_JITTER = Random()  # noqa: S311 (not the global one, which programs may seed)


@dataclass(frozen=True, slots=True)
class Routing:
    """The division of calls between the servers of a client."""

    reads: ReadPolicy = ReadPolicy.ANY
    hedge_ms: int | None = None  # after so long a read is sent to a second server; None: never
    replica_wait_ms: int = 1_000  # the timeout of a read at a reader; then another is asked
    # The timeout of a repeatable call to the writer, after which its role is checked; it is doubled
    # with each attempt.
    writer_silence_ms: int = 2_000

    def __post_init__(self) -> None:
        """Check the times. Raises ValueError unless they are positive."""
        for name in ("hedge_ms", "replica_wait_ms", "writer_silence_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")


async def ask_status(
    channel: Channel, timeout_ms: float, metadata: Metadata | None = None
) -> admin_pb2.StatusReply:
    """Ask the server of `channel` for its status. Raises as `attempt`; `metadata` is as there."""
    from shalekv.v1 import admin_pb2

    method = Method(f"/{ADMIN}/Status", admin_pb2.StatusRequest, admin_pb2.StatusReply)
    return await attempt(channel, method, admin_pb2.StatusRequest(), timeout_ms, metadata)


async def first_answer(
    first: Coroutine[Any, Any, ResultT],
    second: Callable[[], Coroutine[Any, Any, ResultT] | None],
    hedge_s: float,
) -> ResultT:
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


class Fleet:
    """The servers of one database: chooses one for each call. Belongs to one event loop."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        *,
        how: ConnectionOptions,
        routing: Routing,
        retry: RetryPolicy,
        on_new_token: Callable[[], None],
    ) -> None:
        """Create an unconnected fleet; calls connect it. Needs a running event loop.

        `on_new_token` is called when the calls from now on have another access token.
        """
        self.address = addresses[0]
        self.freshness = Freshness()
        self.freshness.is_bound = len(addresses) > 1
        nearest_first = routing.reads is ReadPolicy.NEAREST
        self.endpoints = Endpoints(addresses, nearest_first=nearest_first)
        self._servers = Servers(self.endpoints, self.freshness, how, on_new_token)
        self._routing = routing
        self._retry = retry
        self._search = WriterSearch(self.endpoints, self._ask, self._servers.drop)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._token = self._servers.token
        if self._token is not None:
            self._tasks.add(self._loop.create_task(self._token.follow()))

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

    async def pick(
        self, destination: Destination, timeout_ms: float, tried: Collection[Endpoint] = ()
    ) -> Server:
        """Return a server for a call, none of those that were `tried`.

        Raises `NoWriter` when none is left and the writer is not found within `timeout_ms`, and
        `Unauthenticated` when there is no access token.
        """
        self.check_open()
        if self._token is not None:
            await self._know(self._token, timeout_ms)
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
        """Return `error`, or what it means if it came from closing the connection during a call."""
        if self._is_closed:
            is_ours = type(error) is Cancelled  # by closing the connection
            return abandoned(server.address, "the client") if is_ours else error
        if not server.is_dropped:
            return error
        message = "it is not the writer any more"
        details = replace(error.details, code="UNAVAILABLE", message=message)
        if isinstance(error, Abandoned | Cancelled):
            return ConnectionLost(details)
        if isinstance(error, ClientClosed):
            return NotSent(details)
        return error

    @property
    def token_number(self) -> int:
        """Return the number of the access token that calls have from now on; 0: none."""
        return 0 if self._token is None else self._token.number

    async def _know(self, token: AccessToken, timeout_ms: float) -> None:
        try:
            await token.known(self.address, timeout_ms)
        except Unauthenticated:
            self.check_open()
            raise

    async def renewed(self, number: int, timeout_ms: float) -> bool:
        """Return whether another access token than that with `number`, which was refused, is used.

        If it can be asked for, waits for at most `timeout_ms`.
        """
        return self._token is not None and await self._token.renewed(number, timeout_ms)

    def explained_refusal(self, refusal: ShaleKVError) -> ShaleKVError:
        """Return the refusal of an access token; if another was asked for in vain, it says why."""
        return refusal if self._token is None else self._token.explained(refusal)

    @property
    def can_renew(self) -> bool:
        """Return whether there may be another access token than the present one."""
        return self._token is not None and self._token.can_renew

    async def unary(
        self,
        method: Method[RequestT, ReplyT],
        request: RequestT,
        *,
        destination: Destination,
        is_repeatable: bool,
        timeout_ms: int,
    ) -> ReplyT:
        """Call `method` of a server with `request`, and return the reply. Raises as `run`."""
        span = begin_span(method.name)
        metadata = metadata_here("" if span is None else span.traceparent)
        target = CallTarget(destination, is_repeatable)

        async def send(server: Server, left_ms: float) -> ReplyT:
            reply = await attempt(server.channel, method, request, left_ms, metadata)
            server.note_header(reply.header)  # type: ignore[attr-defined] # all replies have one
            return reply

        if span is None:
            return await self.run(send, target, timeout_ms)
        return await span.cover(send, lambda send: self.run(send, target, timeout_ms))

    async def run(
        self,
        send: Callable[[Server, float], Awaitable[ResultT]],
        target: CallTarget,
        timeout_ms: float,
    ) -> ResultT:
        """Call `send` until it is answered or may not be repeated; return the reply.

        `send` makes one attempt, at the given server, within the given time in ms. Raises what
        `CallState.final` makes of the last error; `NoWriter` when the writer is needed and was not
        found.
        """
        self.check_open()
        deadline_ms = self._loop.time() * 1000.0 + timeout_ms
        number = 0
        if self._token is not None:
            if not self._token.number:
                await self._know(self._token, timeout_ms)
                timeout_ms = max(self._left_ms(deadline_ms), 1.0)
            number = self._token.number
        sole = self.endpoints.sole
        if sole is None or (sole.role is None and self._must_ask(target.destination)):
            state = CallState(target, self._effective(target.destination), self._retry)
            state.token_number = number
            return await self._try_until_done(send, state, deadline_ms, None)
        server = self._servers.of(sole)
        limit_ms = self._retry.attempt_timeout_ms
        try:  # nearly all calls end here, with their first attempt
            return await send(server, min(timeout_ms, limit_ms) if limit_ms else timeout_ms)
        except ShaleKVError as raised:
            error = self.explained(server, raised)
            state = CallState(target, self._effective(target.destination), self._retry)
            state.token_number = number
            state.note(server.endpoint, error)
            self.failed(server, error, state.destination)
            return await self._try_until_done(send, state, deadline_ms, error)

    async def _try_until_done(
        self,
        send: Callable[[Server, float], Awaitable[ResultT]],
        state: CallState,
        deadline_ms: float,
        error: ShaleKVError | None,
    ) -> ResultT:
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
        send: Callable[[Server, float], Awaitable[ResultT]],
        state: CallState,
        deadline_ms: float,
    ) -> ResultT:
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
        send: Callable[[Server, float], Awaitable[ResultT]],
        state: CallState,
        deadline_ms: float,
    ) -> ResultT:
        began_s = self._loop.time()
        left_ms = max(1.0, deadline_ms - began_s * 1000.0)
        if self._has_choice(state):
            left_ms = self._time_ms(server, state, left_ms)
        left_ms = min(left_ms, self._retry.attempt_timeout_ms or left_ms)
        is_read = state.destination is Destination.BY_POLICY
        state.token_number = self.token_number
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
        if state.target.is_long or not state.target.is_repeatable:
            return left_ms
        if state.destination is Destination.BY_POLICY and not server.is_writer:
            wait_ms = state.target.replica_wait_ms or self._routing.replica_wait_ms
            return attempt_ms(left_ms, wait_ms, state.attempts)
        return attempt_ms(left_ms, self._routing.writer_silence_ms, state.attempts)

    async def _delay_before_next_ms(
        self, state: CallState, error: ShaleKVError, left_ms: float
    ) -> float:
        """Return the delay before the next attempt; raises the final error if there is none."""
        if isinstance(error, Unauthenticated) and not state.has_renewed:
            state.has_renewed = True
            if await self.renewed(state.token_number, max(left_ms, 1.0)):
                state.tried.clear()
                return 0.0
            error = self.explained_refusal(error)
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
        chance = _JITTER.random()
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
        # Also what no server has told, such as that none is the writer.
        final.details = final.details.named(REQUEST_ID_HERE.get(), "")
        if cause is None:
            raise final
        raise final from cause

    def _choose(self, destination: Destination, tried: Collection[Endpoint]) -> Endpoint | None:
        sole = self.endpoints.sole
        if sole is not None:
            return None if sole.role is None and self._must_ask(destination) else sole
        chance = _JITTER.random()
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
                await attempt(server.channel, GET.method, newest, PROBE_MS, UNNAMED)
        reply = await self._status_of(server)
        server.note_header(reply.header)
        endpoint.seq = reply.header.seq
        writer_address = reply.reader.writer_address
        return writer_address if is_address(writer_address) else ""

    async def _status_of(self, server: Server) -> admin_pb2.StatusReply:
        number = self.token_number
        try:
            return await ask_status(server.channel, PROBE_MS, UNNAMED)
        except Unauthenticated:
            if not await self.renewed(number, PROBE_MS):
                raise
        return await ask_status(server.channel, PROBE_MS, UNNAMED)

    def _no_writer(self) -> NoWriter:
        addresses = ", ".join(endpoint.address for endpoint in self.endpoints)
        message = f"none of {addresses} is the writer, or knows one that answers"
        if len(self.endpoints) == 1:
            message = "this server is not the writer, and knows none that answers"
        return NoWriter(ErrorDetails(self.address, "UNAVAILABLE", message))
