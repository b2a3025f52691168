"""The client: connections to the servers of one database, and a method for each call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from typing import TypeVar
from weakref import WeakSet

from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_client import operations
from shalekv_client.changes import Change, Compare, Condition
from shalekv_client.closing import AsyncClosing
from shalekv_client.error_table import too_large
from shalekv_client.fleet import READ, READ_AT_WRITER, REPEATABLE_WRITE, WRITE, Aim, Fleet
from shalekv_client.ingest import IngestCalls
from shalekv_client.operations import At, Operation, TxnOperation, attempt, read_header
from shalekv_client.policies import (
    Consistency,
    Destination,
    Durability,
    ReadLevel,
    ReadPolicy,
    Routing,
)
from shalekv_client.results import Commit, TxnResult, Value
from shalekv_client.retry import IdempotencyKeys, RetryPolicy
from shalekv_client.scan import Scan, ScanOrder
from shalekv_client.servers import MESSAGE_BYTES_MAX, Connecting, Server, checked_addresses
from shalekv_client.session import Session
from shalekv_client.snapshots import SnapshotCalls
from shalekv_client.status import Stats, Status, stats_of, status_of
from shalekv_client.stream import UNANSWERED_BYTES_MAX
from shalekv_client.tokens import SessionToken
from shalekv_client.watch import Watch
from shalekv_client.watch_stream import WatchCalls

# --- data_calls
# The calls of a client that read and write data: one method for each operation.


ResultT = TypeVar("ResultT")


class DataCalls(ABC):
    """What `Client` offers for one operation at a time."""

    async def get(
        self,
        key: bytes,
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> Value | None:
        """The value of `key`; None when it has none.

        The state is not older than `max_staleness_ms` (0: whatever its age). `at` a snapshot, an id
        or what has one as its `id`: the value that it holds.
        """
        operation = operations.get(
            key,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def batch_get(
        self,
        keys: Iterable[bytes],
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> list[Value | None]:
        """The values of many keys at one view, in the order of `keys`; None where there is none.

        `max_staleness_ms` and `at` as in `get`.
        """
        operation = operations.batch_get(
            keys,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl_ms: int = 0,
        condition: Condition | None = None,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Set the value of `key`, which expires after `ttl_ms` milliseconds; 0: never.

        With a `condition` that does not hold, nothing is changed and `ConditionFailed` is raised.
        """
        operation = operations.put(
            key,
            value,
            ttl_ms=ttl_ms,
            condition=condition,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def delete(
        self,
        key: bytes,
        *,
        condition: Condition | None = None,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Delete `key`. One that has no value is not an error; `condition` as in `put`."""
        operation = operations.delete(
            key,
            condition=condition,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def delete_range(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        all_keys: bool = False,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Delete the keys from `start` to `end` (exclusive), or those that begin with `prefix`.

        One commit, whose cost does not depend on their number. Without any of the three,
        `all_keys` must say that all keys are meant.
        """
        operation = operations.delete_range(
            start=start,
            end=end,
            prefix=prefix,
            all_keys=all_keys,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def add(
        self,
        key: bytes,
        delta: int = 1,
        *,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        """Add `delta`, which may be negative, to a counter; returns its new value.

        A counter is a value of 8 bytes, a signed integer, least significant byte first; a key
        without a value counts as 0. Raises `NotACounter` for another value, `CounterOverflow` for
        a sum beyond 64 bits.
        """
        operation = operations.add(key, delta, idempotency_key=self._key(idempotency_key))
        return await self._call(operation, timeout_ms)

    async def write(
        self,
        changes: Iterable[Change],
        *,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Apply all of `changes`, such as a `Batch`, in one commit, or none of them."""
        key = self._key(idempotency_key)
        operation = operations.write(changes, durability=durability, idempotency_key=key)
        return await self._call(operation, timeout_ms)

    async def txn(
        self,
        compares: Iterable[Compare],
        then: Iterable[TxnOperation],
        otherwise: Iterable[TxnOperation] = (),
        *,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> TxnResult:
        """Do what `then` says if all of `compares` hold, or else what `otherwise` says.

            await client.txn([Missing(b"lock")], then=[Put(b"lock", me)], otherwise=[Get(b"lock")])

        All in one commit. There is one result for each operation of the branch that was taken: of
        a `Get` the value, or None, from before the changes; of an `Add` the new value of the
        counter; of other changes None.
        """
        operation = operations.txn(
            compares,
            then,
            otherwise,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    @abstractmethod
    async def _call(self, operation: Operation[ResultT], timeout_ms: int | None) -> ResultT:
        """The result of an operation."""

    @abstractmethod
    def _key(self, idempotency_key: bytes | None) -> bytes | None:
        """The key of a write for which the caller has given this one, or none."""

    @abstractmethod
    def _min_seq(self) -> int:
        """What a read has to show at least."""

    @abstractmethod
    def _staleness_ms(self, max_staleness_ms: int | None, at: At) -> int:
        """How old the state of a read may be; 0: whatever it is."""


# --- client


TIMEOUT_MS = 10_000


class Client(DataCalls, IngestCalls, SnapshotCalls, AsyncClosing):
    """Talks to a ShaleKV database. Safe to share between tasks of one event loop.

        async with Client("127.0.0.1:7654") as client:
            await client.put(b"greeting", b"hello")
            found = await client.get(b"greeting")

    Every call raises the errors of `shalekv_client.errors`. `timeout_ms` of a call bounds all of
    its attempts together; of a scan, the time between two messages.

    A call is repeated when it was certainly not applied, or when a repeat does no harm: a read,
    or a write with an idempotency key. The client gives each write a key of its own, the same for
    all attempts, so that a write is applied once even if connections break. To repeat a write
    after a crash of your program, give it a key that you have noted before: 1 to 64 bytes, best
    a UUID of version 7.

    Given the addresses of several servers, writes go to whichever is the writer, which is looked
    for again when it is gone, also where a reader says that it is now; reads go by the policy
    `reads`, and to another server when one does not answer. Whatever server answers, reads of
    level COMMITTED show what this client has written or seen before: see `token`.
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
    ) -> None:
        """`address` is HOST:PORT, or several: a list, or text separated by commas. Needs a running
        event loop; connects at the first calls.

        `timeout_ms` is for calls that name none. `message_bytes_max` bounds what is sent and
        accepted in one message; the server's own limit should not be lower. `coalesce`: concurrent
        calls travel together in the messages of one session, which costs a fraction of a gRPC
        call for each.

        `reads` as `ReadPolicy`, `consistency` as `Consistency`; `token` as `advance`. Reads that
        name no other bound see a state not older than `max_staleness_ms`; 0: whatever its age. A
        get that is not answered within `hedge_ms` is sent to a second server as well, and the first
        answer counts. A reader that has not answered within `replica_wait_ms` is passed over, so
        that one that lags does not use up the time of the call.

        Raises ValueError for an address, an option or a token of another form.
        """
        self.addresses = checked_addresses(address)
        self.address = self.addresses[0]
        self._timeout_ms = _positive("timeout_ms", timeout_ms)
        self._message_bytes_max = message_bytes_max
        self._max_staleness_ms = max_staleness_ms
        self._is_session = Consistency(consistency) is Consistency.SESSION
        self._retry = retry or RetryPolicy()
        self._keys = IdempotencyKeys()
        self.fleet = Fleet(
            self.addresses,
            how=Connecting(message_bytes_max=message_bytes_max, coalesce=coalesce),
            routing=Routing(ReadPolicy(reads), hedge_ms, replica_wait_ms),
            retry=self._retry,
        )
        self._freshness = self.fleet.freshness
        self._watches = WatchCalls(self.fleet, policy=self._retry, timeout_ms=timeout_ms)
        self._sessions: WeakSet[Session] = WeakSet()
        if token is not None:
            self.advance(token)

    async def close(self) -> None:
        """Close the connections; calls under way fail. Again, it does nothing."""
        for session in list(self._sessions):
            await session.aclose()
        await self._watches.aclose()
        await self.fleet.aclose()

    async def aclose(self) -> None:
        """As `close`."""
        await self.close()

    @property
    def token(self) -> SessionToken | None:
        """The newest state that this client has seen; None before the first reply.

        Another client that is given it, in this process or another, by `advance` or when it is
        made, sees this state or a newer one: `str(token)` is text to send there. What this client
        has written is in it, but for writes of durability MEMORY; what it has read is in it, but
        for reads of level UNCOMMITTED: a crash may take those back.
        """
        return self._freshness.token

    def advance(self, token: SessionToken | str) -> None:
        """See the state of `token`, or a newer one, in reads from now on.

        Raises `WrongDatabase` for a token of another database, `InvalidToken` for text that is
        none. When nothing was heard from a server yet, the first call raises `WrongDatabase`.
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
        """The entries from `start` to `end` (exclusive), or those whose keys begin with `prefix`.

            async for entry in client.scan(prefix=b"user/"):
                print(entry.key, entry.value)

        All are read at one sequence number while writes go on. An empty `start` or `end` means
        the first or last of all keys. The scan ends after `limit` entries, or after the entry that
        brings keys and values to `limit_bytes`; 0 means no limit. When a limit has ended it, it
        has `more`, and a `page_token` with which the same scan goes on behind it at the same view.

        `max_staleness_ms` and `at` as in `get`. A scan that is `resumable` goes on by itself when
        its call breaks off: at a snapshot at any server, and that is the default there; otherwise
        at the same server alone, which keeps the view for a while, or raises `PageExpired`.
        """
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
        """Every commit to a range, or to the keys that begin with `prefix`, as it comes.

            async with client.watch(prefix=b"user/") as watch:
                async for event in watch:
                    if isinstance(event, WatchCommit):
                        print(event.seq, event.changes)

        Whole commits in their order, each once, from `from_seq` on; 0: from the next one on. In
        between a `WatchProgress` tells up to which commit everything was told. With `previous`
        each change has the value before, as far as it is known. Any server may tell; when one goes
        away, another goes on. All watches of a client share one stream.

        For a `consumer`, a name of 1 to 128 characters, the server keeps the WAL from what it has
        not acknowledged on (`Watch.ack`), also while nobody watches, for some time; `from_seq` 0
        then means: from there on. Raises as `Watch`.
        """
        self.fleet.check_open()
        return self._watches.watch(
            start=start,
            end=end,
            prefix=prefix,
            from_seq=from_seq,
            previous=previous,
            consumer=consumer,
        )

    def session(self, *, bytes_max: int = UNANSWERED_BYTES_MAX) -> Session:
        """A session of its own at the writer, for many operations in a row without waiting.

        It holds at most `bytes_max` bytes of operations that are sent and unanswered; see
        `Session.ready`.
        """
        self.fleet.check_open()

        async def writer() -> Server:
            return await self.fleet.pick(Destination.WRITER, self._timeout_ms)

        session = Session(
            writer,
            address=self.address,
            bytes_max=bytes_max,
            silence_ms=self._timeout_ms,
            message_bytes_max=self._message_bytes_max,
        )
        self._sessions.add(session)
        return session

    async def status(self, *, timeout_ms: int | None = None) -> Status:
        """What the server at the first address is, and how it does."""

        async def ask(server: Server, left_ms: float) -> admin_pb2.StatusReply:
            request = admin_pb2.StatusRequest()
            return await attempt(server.address, server.admin.Status, request, left_ms)

        return status_of(await self.fleet.run(ask, self._first(), self._time_ms(timeout_ms)))

    async def stats(self, *, timeout_ms: int | None = None) -> Stats:
        """What the processes of the server at the first address have sent to the object store."""

        async def ask(server: Server, left_ms: float) -> admin_pb2.StatsReply:
            request = admin_pb2.StatsRequest()
            return await attempt(server.address, server.admin.Stats, request, left_ms)

        return stats_of(await self.fleet.run(ask, self._first(), self._time_ms(timeout_ms)))

    async def _call(self, operation: Operation[ResultT], timeout_ms: int | None) -> ResultT:
        size_bytes = operation.size_bytes
        if size_bytes > self._message_bytes_max:
            raise too_large(self.address, operation.method, size_bytes, self._message_bytes_max)

        def send(server: Server, left_ms: float) -> Awaitable[ResultT]:
            return server.send(operation, left_ms)

        return await self.fleet.run(send, _aim_of(operation), self._time_ms(timeout_ms))

    def _first(self) -> Aim:
        endpoint = self.fleet.endpoints.get(self.address)
        return Aim(Destination.BY_POLICY, is_repeatable=True, only=endpoint)

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


def _aim_of(operation: Operation[ResultT]) -> Aim:
    if operation.read_level is None:
        return REPEATABLE_WRITE if operation.is_repeatable else WRITE
    is_committed = operation.read_level is ReadLevel.COMMITTED
    return READ if is_committed else READ_AT_WRITER


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")
    return value
