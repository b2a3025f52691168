"""The client: one connection to one server, and a method for each call."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import grpc

from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from shalekv_client.changes import Change, to_message
from shalekv_client.channel import MESSAGE_BYTES_MAX, open_channel
from shalekv_client.error_table import error_of
from shalekv_client.levels import Durability, ReadLevel
from shalekv_client.requests import key_range, read_header, wire_durability
from shalekv_client.results import Commit, Value, commit_of, value_of
from shalekv_client.retry import RetryPolicy, repeat
from shalekv_client.scan import Scan, ScanCall
from shalekv_client.server_status import Status, status_of

TIMEOUT_MS = 10_000

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[RequestT, ReplyT]"


class Client:
    """Talks to the ShaleKV server at one address. Safe to share between tasks of one event loop.

        async with Client("127.0.0.1:7654") as client:
            await client.put(b"greeting", b"hello")
            found = await client.get(b"greeting")

    Every call raises the errors of `shalekv_client.errors`. Reads are repeated by gRPC while the
    server is unavailable; a mutation is repeated only when the server has said that it was not
    applied. `timeout_ms` of a call bounds all of its attempts together; of a scan, the time
    between two messages.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_ms: int = TIMEOUT_MS,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`address` is HOST:PORT. Needs a running event loop; connects at the first call.

        `timeout_ms` is for calls that name none. `message_bytes_max` bounds what is sent and
        accepted in one message. Raises ValueError for an address of another form.
        """
        self.address = address
        self._timeout_ms = _positive(timeout_ms)
        self._retry = retry or RetryPolicy()
        self._channel = open_channel(address, message_bytes_max=message_bytes_max)
        self._kv = kv_pb2_grpc.KVStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        await self._channel.close()

    async def get(
        self,
        key: bytes,
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        timeout_ms: int | None = None,
    ) -> Value | None:
        """The value of `key`; None when it has none."""
        request = kv_pb2.GetRequest(header=read_header(read_level), key=key)
        reply = await self._read(self._kv.Get, request, timeout_ms)
        return value_of(reply)

    async def batch_get(
        self,
        keys: Iterable[bytes],
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        timeout_ms: int | None = None,
    ) -> list[Value | None]:
        """The values of many keys at one view, in the order of `keys`; None where there is none."""
        request = kv_pb2.BatchGetRequest(header=read_header(read_level), keys=keys)
        reply = await self._read(self._kv.BatchGet, request, timeout_ms)
        return [value_of(result) for result in reply.results]

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        durability: Durability = Durability.DURABLE,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Set the value of `key`."""
        level = wire_durability(durability)
        request = kv_pb2.PutRequest(key=key, value=value, durability=level)
        reply = await self._mutate(self._kv.Put, request, timeout_ms)
        return commit_of(reply)

    async def delete(
        self,
        key: bytes,
        *,
        durability: Durability = Durability.DURABLE,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Delete `key`. One that has no value is not an error."""
        request = kv_pb2.DeleteRequest(key=key, durability=wire_durability(durability))
        reply = await self._mutate(self._kv.Delete, request, timeout_ms)
        return commit_of(reply)

    async def write(
        self,
        changes: Iterable[Change],
        *,
        durability: Durability = Durability.DURABLE,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Apply all of `changes`, such as a `Batch`, in one commit, or none of them."""
        request = kv_pb2.WriteRequest(
            changes=map(to_message, changes), durability=wire_durability(durability)
        )
        reply = await self._mutate(self._kv.Write, request, timeout_ms)
        return commit_of(reply)

    def scan(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int = 0,
        keys_only: bool = False,
        read_level: ReadLevel = ReadLevel.COMMITTED,
    ) -> Scan:
        """The entries from `start` to `end` (exclusive), or those whose keys begin with `prefix`.

            async for entry in client.scan(prefix=b"user/"):
                print(entry.key, entry.value)

        All are read at one sequence number while writes go on. An empty `start` or `end` means
        the first or last of all keys; a `limit` of 0 means none.
        """
        request = kv_pb2.ScanRequest(
            header=read_header(read_level),
            range=key_range(start, end, prefix),
            reverse=reverse,
            limit=limit,
            keys_only=keys_only,
        )

        def begin() -> ScanCall:
            return self._kv.Scan(request)

        return Scan(begin, address=self.address, silence_ms=self._timeout_ms)

    async def status(self, *, timeout_ms: int | None = None) -> Status:
        """What the server is and how it does."""
        request = admin_pb2.StatusRequest()
        return status_of(await self._read(self._admin.Status, request, timeout_ms))

    async def _read(
        self, method: Method[RequestT, ReplyT], request: RequestT, timeout_ms: int | None
    ) -> ReplyT:
        return await self._attempt(method, request, self._timeout(timeout_ms))

    async def _mutate(
        self, method: Method[RequestT, ReplyT], request: RequestT, timeout_ms: int | None
    ) -> ReplyT:
        async def attempt(left_ms: float) -> ReplyT:
            return await self._attempt(method, request, left_ms)

        return await repeat(attempt, timeout_ms=self._timeout(timeout_ms), policy=self._retry)

    async def _attempt(
        self, method: Method[RequestT, ReplyT], request: RequestT, timeout_ms: float
    ) -> ReplyT:
        try:
            return await method(request, timeout=timeout_ms / 1000.0)
        except grpc.aio.AioRpcError as error:
            raise error_of(self.address, error) from error

    def _timeout(self, timeout_ms: int | None) -> int:
        return self._timeout_ms if timeout_ms is None else _positive(timeout_ms)


def _positive(timeout_ms: int) -> int:
    if timeout_ms <= 0:
        raise ValueError(f"timeout_ms must be positive, not {timeout_ms}")
    return timeout_ms
