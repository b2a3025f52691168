"""The client: one connection to one server, and a method for each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar
from weakref import WeakSet

from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from shalekv_client import operations
from shalekv_client.cancellation import client_closed
from shalekv_client.changes import Change
from shalekv_client.channel import MESSAGE_BYTES_MAX, open_channel
from shalekv_client.closing import AsyncClosing
from shalekv_client.coalescer import Coalescer, SessionAbsent
from shalekv_client.conditions import Compare, Condition
from shalekv_client.error_table import too_large
from shalekv_client.idempotency import IdempotencyKeys
from shalekv_client.levels import Durability, ReadLevel
from shalekv_client.operations import Operation, TxnOperation, read_header
from shalekv_client.outbox import MESSAGE_BYTES_MAX as COALESCED_BYTES_MAX
from shalekv_client.outbox import UNANSWERED_BYTES_MAX, Outbox
from shalekv_client.results import Commit, TxnResult, Value
from shalekv_client.retry import RetryPolicy, repeat
from shalekv_client.scan import Scan, ScanCall
from shalekv_client.server_stats import Stats, stats_of
from shalekv_client.server_status import Status, status_of
from shalekv_client.session import Session
from shalekv_client.stream import SessionCall
from shalekv_client.unary import UnaryCalls, attempt

TIMEOUT_MS = 10_000

ResultT = TypeVar("ResultT")


class Client(AsyncClosing):
    """Talks to the ShaleKV server at one address. Safe to share between tasks of one event loop.

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
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_ms: int = TIMEOUT_MS,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        retry: RetryPolicy | None = None,
        coalesce: bool = True,
    ) -> None:
        """`address` is HOST:PORT. Needs a running event loop; connects at the first call.

        `timeout_ms` is for calls that name none. `message_bytes_max` bounds what is sent and
        accepted in one message; the server's own limit should not be lower. `coalesce`: concurrent
        calls travel together in the messages of one session, which costs a fraction of a gRPC
        call for each. Raises ValueError for an address of another form.
        """
        self.address = address
        self._timeout_ms = _positive(timeout_ms)
        self._message_bytes_max = message_bytes_max
        self._retry = retry or RetryPolicy()
        self._keys = IdempotencyKeys()
        self._channel = open_channel(address, message_bytes_max=message_bytes_max)
        self._kv = kv_pb2_grpc.KVStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._unary = UnaryCalls(self._kv, address=address)
        self._coalescer: Coalescer | None = None
        if coalesce:
            outbox = Outbox(message_bytes_max=min(COALESCED_BYTES_MAX, message_bytes_max))
            self._coalescer = Coalescer(self._open_session, address=address, outbox=outbox)
        self._sessions: WeakSet[Session] = WeakSet()
        self._is_closed = False

    async def close(self) -> None:
        """Close the connection; calls under way fail. Again, it does nothing."""
        self._is_closed = True
        for session in list(self._sessions):
            await session.aclose()
        if self._coalescer is not None:
            await self._coalescer.aclose()
        await self._channel.close()

    async def aclose(self) -> None:
        """As `close`."""
        await self.close()

    async def get(
        self,
        key: bytes,
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        timeout_ms: int | None = None,
    ) -> Value | None:
        """The value of `key`; None when it has none."""
        return await self._call(operations.get(key, read_level=read_level), timeout_ms)

    async def batch_get(
        self,
        keys: Iterable[bytes],
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        timeout_ms: int | None = None,
    ) -> list[Value | None]:
        """The values of many keys at one view, in the order of `keys`; None where there is none."""
        return await self._call(operations.batch_get(keys, read_level=read_level), timeout_ms)

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
    ) -> Scan:
        """The entries from `start` to `end` (exclusive), or those whose keys begin with `prefix`.

            async for entry in client.scan(prefix=b"user/"):
                print(entry.key, entry.value)

        All are read at one sequence number while writes go on. An empty `start` or `end` means
        the first or last of all keys. The scan ends after `limit` entries, or after the entry that
        brings keys and values to `limit_bytes`; 0 means no limit. When a limit has ended it, it
        has `more`, and a `page_token` with which the same scan goes on behind it at the same view.
        """
        request = kv_pb2.ScanRequest(
            header=read_header(read_level),
            range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
            reverse=reverse,
            limit=limit,
            limit_bytes=limit_bytes,
            keys_only=keys_only,
        )

        def begin(token: bytes) -> ScanCall:
            self._check_open()
            page = kv_pb2.ScanRequest(page_token=token)
            page.MergeFrom(request)
            return self._kv.Scan(page)

        return Scan(begin, page_token, address=self.address, silence_ms=self._timeout_ms)

    def session(self, *, bytes_max: int = UNANSWERED_BYTES_MAX) -> Session:
        """A session of its own, for many operations in a row without waiting for each.

        It holds at most `bytes_max` bytes of operations that are sent and unanswered; see
        `Session.ready`.
        """
        self._check_open()
        session = Session(
            self._open_session,
            address=self.address,
            bytes_max=bytes_max,
            silence_ms=self._timeout_ms,
            message_bytes_max=self._message_bytes_max,
        )
        self._sessions.add(session)
        return session

    async def status(self, *, timeout_ms: int | None = None) -> Status:
        """What the server is and how it does."""

        async def ask(left_ms: float) -> admin_pb2.StatusReply:
            request = admin_pb2.StatusRequest()
            return await attempt(self.address, self._admin.Status, request, left_ms)

        return status_of(await self._repeated(ask, timeout_ms, is_repeatable=True))

    async def stats(self, *, timeout_ms: int | None = None) -> Stats:
        """What the processes of the server have sent to the object store."""

        async def ask(left_ms: float) -> admin_pb2.StatsReply:
            request = admin_pb2.StatsRequest()
            return await attempt(self.address, self._admin.Stats, request, left_ms)

        return stats_of(await self._repeated(ask, timeout_ms, is_repeatable=True))

    async def _call(self, operation: Operation[ResultT], timeout_ms: int | None) -> ResultT:
        size_bytes = operation.size_bytes
        if size_bytes > self._message_bytes_max:
            raise too_large(self.address, operation.method, size_bytes, self._message_bytes_max)

        async def send(left_ms: float) -> ResultT:
            self._check_open()
            if self._coalescer is not None and self._coalescer.takes(operation):
                try:
                    return await self._coalescer.call(operation, left_ms)
                except SessionAbsent:
                    pass  # so soon that the time left is still about the same
            return await self._unary.call(operation, left_ms)

        return await self._repeated(send, timeout_ms, is_repeatable=operation.is_repeatable)

    async def _repeated(
        self,
        send: Callable[[float], Awaitable[ResultT]],
        timeout_ms: int | None,
        *,
        is_repeatable: bool,
    ) -> ResultT:
        self._check_open()
        return await repeat(
            send,
            timeout_ms=self._timeout_ms if timeout_ms is None else _positive(timeout_ms),
            policy=self._retry,
            is_repeatable=is_repeatable,
        )

    def _key(self, idempotency_key: bytes | None) -> bytes | None:
        if idempotency_key is None and self._retry.idempotent:
            return self._keys.next()
        return idempotency_key

    def _open_session(self) -> SessionCall:
        self._check_open()
        return self._kv.Session()

    def _check_open(self) -> None:
        if self._is_closed:
            raise client_closed(self.address)


def _positive(timeout_ms: int) -> int:
    if timeout_ms <= 0:
        raise ValueError(f"timeout_ms must be positive, not {timeout_ms}")
    return timeout_ms
