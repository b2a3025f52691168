"""A server for tests of clients: the API over a dict, on a real socket, that fails when told to.

It answers what the published documentation of the API says and nothing else, so that a client that
works with it needs no more than what is documented.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from shalekv.errors import InvalidRequest, ShaleError
from shalekv.rpc.status import status_of
from shalekv.v1 import admin_pb2, kv_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Failure: TypeAlias = Callable[[Context], Awaitable[NoReturn]]
Methods: TypeAlias = "dict[str, grpc.RpcMethodHandler[Any, Any]]"

EPOCH = 7
DATABASE_ID = bytes(range(16))
SCAN_MESSAGE_ENTRIES = 3  # so that small scans come in several messages
KEY_BYTES_MAX = 64 * 1024
MESSAGE_BYTES_MAX = 8 * 1024 * 1024


@dataclass
class State:
    """The data, what has been asked, and how to fail."""

    data: dict[bytes, kv_pb2.Entry] = field(default_factory=dict)
    seq: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # a call has come
    calls: Counter[str] = field(default_factory=Counter)
    requests: list[Any] = field(default_factory=list)
    failures: deque[Failure | None] = field(default_factory=deque)  # of the next calls; None: works
    scan_failure_after: int | None = None  # fail every scan after so many messages

    def header(self) -> kv_pb2.ReplyHeader:
        """What every reply says."""
        return kv_pb2.ReplyHeader(
            database_id=DATABASE_ID,
            role=kv_pb2.ROLE_WRITER,
            epoch=EPOCH,
            seq=self.seq,
            wal_id=self.seq or None,
        )

    async def begin(self, context: Context, request: Message) -> None:
        """Count the call, and fail it if it is its turn."""
        self.calls[request.DESCRIPTOR.name.removesuffix("Request")] += 1
        self.requests.append(request)
        self.begun.set()
        fail = self.failures.popleft() if self.failures else None
        if fail is not None:
            await fail(context)


def refusing(error: ShaleError) -> Failure:
    """Fails with what the published table says of `error`."""

    async def fail(context: Context) -> NoReturn:
        await context.abort_with_status(rpc_status.to_status(status_of(error)))

    return fail


def bare(code: grpc.StatusCode, message: str = "made up by gRPC") -> Failure:
    """Fails as gRPC itself and proxies do: without details."""

    async def fail(context: Context) -> NoReturn:
        await context.abort(code, message)

    return fail


def silent() -> Failure:
    """Never answers."""

    async def fail(_context: Context) -> NoReturn:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets this future")

    return fail


class DictServer:
    """A running server; use it as an asynchronous context manager."""

    def __init__(self) -> None:
        self.state = State()
        self.address = ""
        limits = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=limits)
        unary = grpc.unary_unary_rpc_method_handler
        replies = _serialized
        kv: Methods = {
            "Get": unary(self._get, kv_pb2.GetRequest.FromString, replies),
            "BatchGet": unary(self._batch_get, kv_pb2.BatchGetRequest.FromString, replies),
            "Put": unary(self._put, kv_pb2.PutRequest.FromString, replies),
            "Delete": unary(self._delete, kv_pb2.DeleteRequest.FromString, replies),
            "Write": unary(self._write, kv_pb2.WriteRequest.FromString, replies),
            "Scan": grpc.unary_stream_rpc_method_handler(
                self._scan, kv_pb2.ScanRequest.FromString, replies
            ),
        }
        admin: Methods = {
            "Status": unary(self._status, admin_pb2.StatusRequest.FromString, replies)
        }
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler("shalekv.v1.KV", kv),
                grpc.method_handlers_generic_handler("shalekv.v1.Admin", admin),
            ]
        )

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop at once; calls under way break off."""
        await self._server.stop(None)

    async def _get(self, request: kv_pb2.GetRequest, context: Context) -> kv_pb2.GetReply:
        await self.state.begin(context, request)
        header = self.state.header()
        found = self.state.data.get(request.key)
        if found is None:
            return kv_pb2.GetReply(header=header)
        return kv_pb2.GetReply(header=header, found=True, value=found.value, seq=found.seq)

    async def _batch_get(
        self, request: kv_pb2.BatchGetRequest, context: Context
    ) -> kv_pb2.BatchGetReply:
        await self.state.begin(context, request)
        reply = kv_pb2.BatchGetReply(header=self.state.header())
        for found in map(self.state.data.get, request.keys):
            if found is None:
                reply.results.add()
            else:
                reply.results.add(found=True, value=found.value, seq=found.seq)
        return reply

    async def _put(self, request: kv_pb2.PutRequest, context: Context) -> kv_pb2.PutReply:
        await self.state.begin(context, request)
        change = kv_pb2.PutChange(key=request.key, value=request.value)
        await self._commit(context, [kv_pb2.Change(put=change)])
        return kv_pb2.PutReply(header=self.state.header(), durability=request.durability)

    async def _delete(self, request: kv_pb2.DeleteRequest, context: Context) -> kv_pb2.DeleteReply:
        await self.state.begin(context, request)
        change = kv_pb2.DeleteChange(key=request.key)
        await self._commit(context, [kv_pb2.Change(delete=change)])
        return kv_pb2.DeleteReply(header=self.state.header(), durability=request.durability)

    async def _write(self, request: kv_pb2.WriteRequest, context: Context) -> kv_pb2.WriteReply:
        await self.state.begin(context, request)
        await self._commit(context, request.changes)
        return kv_pb2.WriteReply(header=self.state.header(), durability=request.durability)

    async def _scan(
        self, request: kv_pb2.ScanRequest, context: Context
    ) -> AsyncIterator[kv_pb2.ScanReply]:
        await self.state.begin(context, request)
        if request.range.prefix and (request.range.start or request.range.end):
            await refusing(InvalidRequest("range.prefix", "excludes start and end"))(context)
        keys = sorted(filter(_inside(request.range), self.state.data), reverse=request.reverse)
        taken = keys[: request.limit] if request.limit else keys
        found = [self.state.data[key] for key in taken]
        if request.keys_only:
            found = [kv_pb2.Entry(key=entry.key, seq=entry.seq) for entry in found]
        header = self.state.header()
        for number, at in enumerate(range(0, max(1, len(found)), SCAN_MESSAGE_ENTRIES)):
            if number == self.state.scan_failure_after:
                await refusing(ShaleError("the scan was made to fail"))(context)
            part = found[at : at + SCAN_MESSAGE_ENTRIES]
            more = at + len(part) == len(found) < len(keys)
            yield kv_pb2.ScanReply(header=header, entries=part, more=more)

    async def _status(
        self, request: admin_pb2.StatusRequest, context: Context
    ) -> admin_pb2.StatusReply:
        await self.state.begin(context, request)
        return admin_pb2.StatusReply(
            header=self.state.header(),
            version="0.0.7",
            url="memory://dict",
            uptime_ms=90_061_000,
            writer=admin_pb2.WriterStatus(commits=self.state.seq, queued_bytes_max=1 << 26),
            memtable=admin_pb2.MemtableStatus(keys=len(self.state.data), bytes=5_000_000),
            manifest=admin_pb2.ManifestStatus(manifest_id=3),
        )

    async def _commit(self, context: Context, changes: Iterable[kv_pb2.Change]) -> None:
        for number, change in enumerate(changes):
            key = change.put.key or change.delete.key
            if not 0 < len(key) <= KEY_BYTES_MAX:
                problem = f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}"
                await refusing(InvalidRequest(f"changes[{number}].key", problem))(context)
        self.state.seq += 1
        for change in changes:
            if change.HasField("put"):
                put = change.put
                entry = kv_pb2.Entry(key=put.key, value=put.value, seq=self.state.seq)
                self.state.data[put.key] = entry
            else:
                self.state.data.pop(change.delete.key, None)


def _serialized(reply: Message) -> bytes:
    return reply.SerializeToString()


def _inside(keys: kv_pb2.KeyRange) -> Callable[[bytes], bool]:
    def inside(key: bytes) -> bool:
        is_before_end = not keys.end or key < keys.end
        return key.startswith(keys.prefix) and keys.start <= key and is_before_end

    return inside
