"""The asyncio client: connections to the servers of one database, and a method for each call.

`shalekv_client.calls` has the calls that read, write and load data; `Client` adds connections,
scans, watches, sessions and the status of servers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

from shalekv.v1 import kv_pb2
from shalekv_client.calls import AdminCalls, DataCalls
from shalekv_client.closing import AsyncCloseable
from shalekv_client.error_table import too_large
from shalekv_client.operations import (
    COUNT,
    At,
    Operation,
    attempt,
    destination_of,
    in_context,
    read_header,
)
from shalekv_client.policies import (
    MESSAGE_BYTES_MAX,
    UNANSWERED_BYTES_MAX,
    Consistency,
    Destination,
    ReadLevel,
    ReadPolicy,
    Wire,
)
from shalekv_client.routing.addresses import checked_addresses, chosen_wire
from shalekv_client.routing.fleet import Fleet, Routing, ask_status
from shalekv_client.routing.idempotency import IdempotencyKeys
from shalekv_client.routing.retry import (
    READ,
    READ_AT_WRITER,
    REPEATABLE_WRITE,
    WRITE,
    CallTarget,
    RetryPolicy,
)
from shalekv_client.routing.security import Security, TlsOptions
from shalekv_client.routing.servers import ConnectionOptions, Server
from shalekv_client.routing.spans import begin_span
from shalekv_client.routing.tokens import SessionToken

if TYPE_CHECKING:  # each is imported by the method that uses it
    from pathlib import Path

    from shalekv.v1 import admin_pb2
    from shalekv_client.admin import Profile, ProfileFormat, SlowCalls, Stats
    from shalekv_client.errors import ShaleKVError
    from shalekv_client.routing.access_token import TokenFunction
    from shalekv_client.scan import Scan
    from shalekv_client.session import Session
    from shalekv_client.status import Status
    from shalekv_client.watch import Watch
    from shalekv_client.watch_stream import ClientWatches

ResultT = TypeVar("ResultT")

TIMEOUT_MS = 10_000


class Client(DataCalls, AdminCalls, AsyncCloseable):
    """A client of a ShaleKV database. Safe to share between tasks of one event loop.

        async with Client("127.0.0.1:7654") as client:
            await client.put(b"greeting", b"hello")
            found = await client.get(b"greeting")

    Every call raises the errors of `shalekv_client.errors`. `timeout_ms` of a call bounds all of
    its attempts together; of a scan, the time between two messages.

    A call is repeated when it was certainly not applied, or when a repeat is harmless: a read,
    or a write with an idempotency key. The client gives each write a new key, the same for all its
    attempts, so that a write is applied once even if connections break. To repeat a write after a
    crash of your program, give it a key that you have stored before: 1 to 64 bytes, best a UUID of
    version 7.

    With the addresses of several servers, writes go to the server that is the writer. When it
    fails, the client searches for the new writer, also at the address that a reader reports. Reads
    go to a server chosen by the policy `reads`, and to another one when that does not answer.
    Whichever server answers, reads of level COMMITTED show what this client has written or seen
    before: see `token`.

    With `tls`, all connections are encrypted, also those to addresses that servers report: see
    `TlsOptions`; True: servers are verified by the authorities of the system. An `access_token`
    says who the client is, and goes with every call. It is a text, or a function that returns one,
    or what is awaited for one. The function is called in a thread, once a minute, and when a server
    has refused the token; it is given up after 15 s, and called again later. A file is read once a
    second, and then as well. A refused call is repeated once if there is another token. Without
    TLS, a token is sent only within the machine, unless `insecure_token` says that the network is
    trusted.
    """

    def __init__(  # noqa: PLR0913 (all but the first are options)
        self,
        address: str | Iterable[str],
        *,
        timeout_ms: int = TIMEOUT_MS,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        retry: RetryPolicy | None = None,
        coalesce: bool = True,
        reads: ReadPolicy | str = ReadPolicy.ANY,
        consistency: Consistency | str = Consistency.SESSION,
        token: SessionToken | str | None = None,
        max_staleness_ms: int = 0,
        hedge_ms: int | None = None,
        replica_wait_ms: int = 1_000,
        wire: Wire | str | None = None,
        tls: TlsOptions | bool = False,
        access_token: str | TokenFunction | None = None,
        access_token_file: str | Path | None = None,
        insecure_token: bool = False,
    ) -> None:
        """Create a client, which connects at its first call. Needs a running event loop.

        `address` is HOST:PORT or unix:PATH, or several: a list, or text separated by commas.
        `timeout_ms` is the default of all calls. `message_bytes_max` bounds what is sent and
        accepted in one message; the server's own limit should not be lower. With `coalesce`,
        concurrent calls share the messages of one session, which costs a fraction of a gRPC call
        for each.

        See `ReadPolicy` for `reads`, `Consistency` for `consistency`, `advance` for `token`. Reads
        without a bound of their own see a state not older than `max_staleness_ms`; 0: of any age.
        A get that is not answered within `hedge_ms` is sent to a second server as well, and the
        first answer counts. When a reader has not answered within `replica_wait_ms`, the next
        server is asked, so that a lagging reader does not use up the time of the call.

        The default of `wire` is that of SHALEKV_CLIENT_WIRE, or NATIVE. Raises ValueError for what
        is malformed, and for files that cannot be used; OSError if that of the token is not there.
        """
        self.addresses = checked_addresses(address)
        self.address = self.addresses[0]
        self._timeout_ms = _positive("timeout_ms", timeout_ms)
        self._message_bytes_max = message_bytes_max
        self._max_staleness_ms = max_staleness_ms
        self._is_session = Consistency(consistency) is Consistency.SESSION
        self._retry = retry or RetryPolicy()
        self._keys = IdempotencyKeys()
        security = Security.of(
            self.addresses, tls, access_token, access_token_file, is_insecure=insecure_token
        )
        self.fleet = Fleet(
            self.addresses,
            how=ConnectionOptions(message_bytes_max, coalesce, chosen_wire(wire), security),
            routing=Routing(ReadPolicy(reads), hedge_ms, replica_wait_ms),
            retry=self._retry,
            on_new_token=self._renew_sessions,
        )
        self._freshness = self.fleet.freshness
        self._watches: ClientWatches | None = None
        self._sessions: WeakSet[Session] = WeakSet()
        if token is not None:
            self.advance(token)

    async def close(self) -> None:
        """Close the connections; calls under way fail. A second call does nothing."""
        for session in list(self._sessions):
            await session.aclose()
        if self._watches is not None:
            await self._watches.aclose()
        await self.fleet.aclose()

    async def aclose(self) -> None:
        """Do the same as `close`."""
        await self.close()

    @property
    def token(self) -> SessionToken | None:
        """The newest state that this client has seen; None before the first reply.

        Another client, in this process or another, that gets the token by `advance` or when it is
        created sees this state or a newer one; `str(token)` is the token as text. It is no secret,
        and says nothing of who the client is, as an `access_token` does. The state includes what
        this client has written, except writes of durability MEMORY, and what it has read, except
        reads of level UNCOMMITTED: a crash may revoke those.
        """
        return self._freshness.token

    def advance(self, token: SessionToken | str) -> None:
        """Make later reads see the state of `token` or a newer one.

        Raises `WrongDatabase` for a token of another database, `InvalidToken` for text that is not
        a token. Before the first reply of a server, the database is not known yet; then the first
        call raises `WrongDatabase`.
        """
        known = token if isinstance(token, SessionToken) else SessionToken.parse(token)
        self._freshness.advance(known, self.address)

    def scan(  # noqa: PLR0913 (a range, how to read it, and where to stop)
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int = 0,
        limit_bytes: int = 0,
        keys_only: bool = False,
        page_token: bytes = b"",
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        resumable: bool | None = None,
    ) -> Scan:
        """Scan the entries from `start` to `end` (exclusive), or whose keys have `prefix`.

            async for entry in client.scan(prefix=b"user/"):
                print(entry.key, entry.value)

        All entries are read at one sequence number while writes go on. An empty `start` or `end`
        means the first or last of all keys. The scan ends after `limit` entries, or after the entry
        that brings keys and values to `limit_bytes`; 0 means no limit. When a limit has ended it,
        `more` is set, and `page_token` continues the same scan behind it, at the same view.

        `max_staleness_ms` and `at` are as in `get`. A `resumable` scan continues by itself when
        its call breaks off. At a snapshot it can do so at any server, and is resumable by default.
        Otherwise only the same server, which keeps the view for a while, can continue it; when the
        view is gone, the scan raises `PageExpired`.
        """
        from shalekv_client.scan import Scan, ScanOrder

        header = read_header(
            read_level, max_staleness_ms=self._staleness_ms(max_staleness_ms, at), at=at
        )
        request = kv_pb2.ScanRequest(
            header=header,
            range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
            reverse=reverse,
            limit=limit,
            limit_bytes=limit_bytes,
            keys_only=keys_only,
            resumable=at is not None if resumable is None else resumable,
        )
        min_seq = self._min_seq() if at is None and not page_token else 0
        order = ScanOrder(request, read_level, min_seq, silence_ms=self._timeout_ms)
        return Scan(self.fleet, order, page_token)

    def watch(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        from_seq: int = 0,
        previous: bool = False,
        consumer: str = "",
    ) -> Watch:
        """Watch the commits to a range, or to the keys that begin with `prefix`.

            async with client.watch(prefix=b"user/") as watch:
                async for event in watch:
                    if isinstance(event, WatchCommit):
                        print(event.seq, event.changes)

        Commits are delivered whole, in order and once, from `from_seq` on; 0: from the next commit
        on. A `WatchProgress` in between says up to which sequence number all commits were
        delivered. With `previous`, each change has the previous value, if it is known. Any server
        can serve a watch; when one fails, another continues. All watches of a client share one
        stream.

        For a `consumer`, a name of 1 to 128 characters, the server keeps the WAL from the first
        unacknowledged commit on (see `Watch.ack`), for some time also while nobody watches;
        `from_seq` 0 then means from that commit on. Raises as `Watch`.
        """
        from shalekv_client.watch_stream import ClientWatches

        self.fleet.check_open()
        if self._watches is None:
            self._watches = ClientWatches(
                self.fleet, policy=self._retry, timeout_ms=self._timeout_ms
            )
        return self._watches.watch(
            start=start,
            end=end,
            prefix=prefix,
            from_seq=from_seq,
            previous=previous,
            consumer=consumer,
        )

    def session(self, *, bytes_max: int = UNANSWERED_BYTES_MAX) -> Session:
        """Open a session at the writer, to send many operations without waiting for each.

        At most `bytes_max` bytes of its operations are sent and unanswered at a time; see
        `Session.ready`.
        """
        from shalekv_client.session import Session, StreamServers

        self.fleet.check_open()
        session = Session(
            StreamServers(self.fleet, self._retry, self._timeout_ms).find,
            address=self.address,
            bytes_max=bytes_max,
            silence_ms=self._timeout_ms,
            message_bytes_max=self._message_bytes_max,
            can_renew=self.fleet.can_renew,
        )
        self._sessions.add(session)
        return session

    def _renew_sessions(self) -> None:
        for session in list(self._sessions):
            session.renew()

    async def status(self, *, timeout_ms: int | None = None) -> Status:
        """Return the status of the server at the first address."""
        from shalekv_client.status import status_of

        async def ask(server: Server, left_ms: float) -> admin_pb2.StatusReply:
            return await ask_status(server.channel, left_ms)

        return status_of(await self.fleet.run(ask, self._first(), self._time_ms(timeout_ms)))

    async def stats(self, *, timeout_ms: int | None = None) -> Stats:
        """Return the requests that the server at the first address has sent to the object store.

        They are counted for each of its processes.
        """
        from shalekv_client.admin import STATS, stats_of

        async def ask(server: Server, left_ms: float) -> admin_pb2.StatsReply:
            return await attempt(server.channel, STATS, STATS.request(), left_ms)

        return stats_of(await self.fleet.run(ask, self._first(), self._time_ms(timeout_ms)))

    async def slow_calls(self, *, timeout_ms: int | None = None) -> SlowCalls:
        """Return the newest slow calls of the server at the first address: at most 100.

        Needs the verb ADMIN.
        """
        from shalekv_client.admin import SLOW_CALLS, slow_calls_of

        async def ask(server: Server, left_ms: float) -> admin_pb2.ListSlowCallsReply:
            return await attempt(server.channel, SLOW_CALLS, SLOW_CALLS.request(), left_ms)

        return slow_calls_of(await self.fleet.run(ask, self._first(), self._time_ms(timeout_ms)))

    async def profile(
        self,
        duration_ms: int = 10_000,
        *,
        profile_format: ProfileFormat | None = None,
        timeout_ms: int | None = None,
    ) -> Profile:
        """Observe for a time in which functions the server at the first address spends its time.

        The default of `profile_format` is a text, that of `timeout_ms` the client's timeout beyond
        `duration_ms`. Needs the verb ADMIN. Raises `NotApplied` while another profile is taken, and
        where the server has no pyinstrument.
        """
        from shalekv_client.admin import PROFILE, PROFILE_FORMAT, profile_of

        request = PROFILE.request(duration_ms=duration_ms)
        if profile_format is not None:
            request.format = PROFILE_FORMAT(profile_format.value)

        async def ask(server: Server, left_ms: float) -> admin_pb2.ProfileReply:
            return await attempt(server.channel, PROFILE, request, left_ms)

        if timeout_ms is None:
            timeout_ms = self._timeout_ms + duration_ms
        endpoint = self.fleet.endpoints.get(self.address)
        target = CallTarget(Destination.BY_POLICY, is_repeatable=False, only=endpoint)
        return profile_of(await self.fleet.run(ask, target, self._time_ms(timeout_ms)))

    async def _call(self, operation: Operation[ResultT], timeout_ms: int | None) -> ResultT:
        operation = in_context(operation)
        size_bytes = len(operation.data)
        if size_bytes > self._message_bytes_max:
            raise too_large(self.address, str(operation.kind), size_bytes, self._message_bytes_max)

        span = None if operation.traceparent else begin_span(operation.kind.name)
        if span is not None:
            operation = operation._replace(traceparent=span.traceparent)
        target, time_ms = _target_of(operation), self._time_ms(timeout_ms)

        def send(server: Server, left_ms: float) -> Awaitable[ResultT]:
            return server.send(operation, left_ms)

        if span is None:
            return await self.fleet.run(send, target, time_ms)
        return await span.cover(send, lambda send: self.fleet.run(send, target, time_ms))

    async def resume(
        self,
        operation: Operation[ResultT],
        timeout_ms: float,
        *,
        failed: ShaleKVError | None = None,
    ) -> ResultT:
        """Send an operation whose first attempt, made for this client, has `failed`.

        The attempts after it are those of any call. None: there was no attempt yet.
        """
        if failed is None:
            return await self._call(operation, int(timeout_ms))
        failures = [failed]

        def send(server: Server, left_ms: float) -> Awaitable[ResultT]:
            if failures:
                raise failures.pop()
            return server.send(operation, left_ms)

        return await self.fleet.run(send, _target_of(operation), timeout_ms)

    def _first(self) -> CallTarget:
        endpoint = self.fleet.endpoints.get(self.address)
        return CallTarget(Destination.BY_POLICY, is_repeatable=True, only=endpoint)

    def _key(self, idempotency_key: bytes | None) -> bytes | None:
        if idempotency_key is None and self._retry.idempotent:
            return self._keys.next()
        return idempotency_key

    def _min_seq(self) -> int:
        return self._freshness.seq if self._is_session else 0

    def _staleness_ms(self, max_staleness_ms: int | None, at: At) -> int:
        if max_staleness_ms is not None:
            return max_staleness_ms
        return self._max_staleness_ms if at is None else 0

    def _time_ms(self, timeout_ms: int | None) -> int:
        return self._timeout_ms if timeout_ms is None else _positive("timeout_ms", timeout_ms)


def _target_of(operation: Operation[ResultT]) -> CallTarget:
    if operation.read_level is None:
        return REPEATABLE_WRITE if operation.is_repeatable else WRITE
    if operation.kind is COUNT:
        return CallTarget(destination_of(operation.read_level), is_repeatable=True, is_long=True)
    is_committed = operation.read_level is ReadLevel.COMMITTED
    return READ if is_committed else READ_AT_WRITER


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")
    return value
