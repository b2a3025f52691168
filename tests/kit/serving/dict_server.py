"""A server for tests of clients: the API over a dict, on a real socket, with faults on demand.

It implements the published documentation of the API and nothing else: a client that works with it
needs no more than what is documented.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NoReturn, Self, TypeAlias

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shalekv.errors import InvalidRequest, PageExpired, ShaleError
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_wire.trace_context import call_names
from tests.kit.serving.dict_state import (
    DATABASE_ID,
    EPOCH,
    Broken,
    Data,
    Failed,
    Failure,
    Refused,
    State,
    bare,
    inside,
    losing,
    refusing,
    silent,
)

__all__ = [
    "DATABASE_ID",
    "EPOCH",
    "DictServer",
    "Failure",
    "ServerState",
    "bare",
    "end",
    "losing",
    "received",
    "refusing",
    "silent",
]

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Methods: TypeAlias = "dict[str, grpc.RpcMethodHandler[Any, Any]]"
Operations: TypeAlias = "list[kv_pb2.SessionOperation]"

MESSAGE_BYTES_MAX = 8 * 1024 * 1024
MESSAGE_COUNT_MAX = 10_000


class ServerState(State):
    """The data, the faults that tests request, and what tests want to know of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_failure_after: int | None = None  # fail every scan after this many messages
        self.scan_breaks_after: int | None = None  # fail one scan after this many messages
        self.scan_breaks_with: Failure = bare(grpc.StatusCode.UNAVAILABLE)
        self.scan_headers: list[kv_pb2.RequestHeader] = []
        self.views: dict[bytes, tuple[Data, bytes]] = {}  # by page token, with the last key
        self.sessions_begun = 0
        self.session_ends = asyncio.Semaphore(0)
        self.session_failures: list[Failure] = []  # of the next sessions, when they begin
        self.messages: list[list[int]] = []  # the ids in each message of a session, in order
        self.unanswered_bytes = 0
        self.unanswered_bytes_most = 0
        self.answering = asyncio.Event()  # sessions answer; until then they only receive
        self.answering.set()
        self.received = asyncio.Condition()  # a message of a session has come
        self.traceparents: list[str] = []  # of operations, scans and calls; empty: it had none
        self.stats: deque[admin_pb2.StatsReply] = deque()  # of the next calls, without a header

    def admit(self, request: kv_pb2.ScanRequest) -> None:
        """Raises `Failed` when this server does not scan."""


class DictServer:
    """A running server; use it as an asynchronous context manager."""

    scan_message_entries = 3  # so that small scans come in several messages

    def __init__(
        self,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        message_count_max: int = MESSAGE_COUNT_MAX,
    ) -> None:
        self.state = ServerState()
        self.snapshots: dict[bytes, Data] = {}
        self.address = ""
        self._limits = [
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.so_reuseport", 0),
        ]
        self._message_count_max = message_count_max
        self._server = self._new_server()

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop(None)

    def _new_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._limits)
        kinds: dict[str, Any] = {
            "Get": kv_pb2.GetRequest,
            "BatchGet": kv_pb2.BatchGetRequest,
            "Count": kv_pb2.CountRequest,
            "Put": kv_pb2.PutRequest,
            "Delete": kv_pb2.DeleteRequest,
            "DeleteRange": kv_pb2.DeleteRangeRequest,
            "Write": kv_pb2.WriteRequest,
            "Txn": kv_pb2.TxnRequest,
        }
        unary, replies = grpc.unary_unary_rpc_method_handler, _serialized
        kv: Methods = {
            name: unary(self._answer, kind.FromString, replies) for name, kind in kinds.items()
        }
        kv["Scan"] = grpc.unary_stream_rpc_method_handler(
            self._scan, kv_pb2.ScanRequest.FromString, replies
        )
        kv["Session"] = grpc.stream_stream_rpc_method_handler(
            self._session, kv_pb2.SessionRequest.FromString, replies
        )
        admin: Methods = {
            "Status": unary(self._status, admin_pb2.StatusRequest.FromString, replies),
            "Stats": unary(self._stats, admin_pb2.StatsRequest.FromString, replies),
            "IngestSst": unary(self._answer, admin_pb2.IngestSstRequest.FromString, replies),
        }
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler("shalekv.v1.KV", kv),
                grpc.method_handlers_generic_handler("shalekv.v1.Admin", admin),
            ]
        )
        return server

    async def _answer(self, request: Any, context: Context) -> Message:
        self._note_caller(context)
        try:
            return self.state.answer(request)
        except Failed as failed:
            await end(context, failed.failure)

    def _note_caller(self, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.state.traceparents.append(str(metadata.get("traceparent", "")))

    async def _session(
        self, requests: AsyncIterator[kv_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[kv_pb2.SessionReply]:
        self.state.sessions_begun += 1
        if self.state.session_failures:
            await end(context, self.state.session_failures.pop(0))
        queue: asyncio.Queue[Operations | None] = asyncio.Queue()
        unanswered = 0
        failure: Failure | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._receive(requests, queue))
                while failure is None and (operations := await queue.get()) is not None:
                    await self.state.answering.wait()
                    if len(operations) > self._message_count_max:
                        failure = refusing(InvalidRequest("operations", "too many"))
                        break
                    reply = kv_pb2.SessionReply()
                    failure = self._answer_all(operations, reply)
                    unanswered += len(operations) - len(reply.results)
                    if reply.results:
                        yield reply
                reader.cancel()
            if failure is not None:
                await end(context, failure)
            if unanswered:
                await end(context, silent())  # a stream stays until all is answered
        finally:
            self.state.session_ends.release()

    async def _receive(
        self,
        requests: AsyncIterator[kv_pb2.SessionRequest],
        queue: asyncio.Queue[Operations | None],
    ) -> None:
        state = self.state
        async for request in requests:
            state.messages.append([operation.id for operation in request.operations])
            state.unanswered_bytes += sum(each.ByteSize() for each in request.operations)
            state.unanswered_bytes_most = max(state.unanswered_bytes_most, state.unanswered_bytes)
            queue.put_nowait(list(request.operations))
            async with state.received:
                state.received.notify_all()
        queue.put_nowait(None)

    def _answer_all(self, operations: Operations, reply: kv_pb2.SessionReply) -> Failure | None:
        """Add the results of operations, until one breaks the stream; returns how."""
        for operation in operations:
            kind = operation.WhichOneof("operation")
            assert kind is not None
            self.state.traceparents.append(operation.traceparent)
            try:
                answer = self.state.answer(getattr(operation, kind))
            except Failed as failed:
                if isinstance(failed.failure, Broken):
                    return failed.failure
                if isinstance(failed.failure, Refused):
                    error = _operation_error(failed.failure.status)
                    names = call_names(operation.request_id, operation.traceparent)
                    error.request_id, error.trace_id = names.request_id, names.trace_id
                    reply.results.add(id=operation.id, error=error)
            else:
                result = reply.results.add(id=operation.id)
                getattr(result, kind).CopyFrom(answer)
            self.state.unanswered_bytes -= operation.ByteSize()
        return None

    async def _scan(
        self, request: kv_pb2.ScanRequest, context: Context
    ) -> AsyncIterator[kv_pb2.ScanReply]:
        state, size = self.state, self.scan_message_entries
        self._note_caller(context)
        state.scan_headers.append(request.header)
        if failure := state.begin(request):
            await end(context, failure)
        try:
            state.admit(request)
            data, found, more = self._page(request)
        except Failed as failed:
            await end(context, failed.failure)
        for sent, at in enumerate(range(0, max(1, len(found)), size)):
            if sent == state.scan_failure_after:
                await end(context, refusing(ShaleError("the scan was made to fail")))
            if sent == state.scan_breaks_after:
                state.scan_breaks_after = None
                await end(context, state.scan_breaks_with)
            part = found[at : at + size]
            is_last = at + len(part) == len(found)
            has_token = bool(part) and (more if is_last else request.resumable)
            yield kv_pb2.ScanReply(
                header=state.header(),
                entries=part,
                more=more and is_last,
                page_token=self._token(request, data, part[-1].key) if has_token else b"",
            )

    def _page(self, request: kv_pb2.ScanRequest) -> tuple[Data, list[kv_pb2.Entry], bool]:
        """Return the view that is read, the entries of a page, and whether there is more; raises
        `Failed`.
        """
        if request.range.prefix and (request.range.start or request.range.end):
            raise Failed(refusing(InvalidRequest("range.prefix", "excludes start and end")))
        data, last_key = dict(self.state.data), b""
        snapshot_id, token = request.header.snapshot_id, request.page_token
        if snapshot_id:
            data, last_key = self.snapshots[snapshot_id], token.removeprefix(b"at " + snapshot_id)
        elif token:
            if token not in self.state.views:
                raise Failed(refusing(PageExpired("the view of the page token is gone")))
            data, last_key = self.state.views[token]
        keys = sorted(filter(inside(request.range), data), reverse=request.reverse)
        if last_key:
            keys = keys[keys.index(last_key) + 1 :]
        found: list[kv_pb2.Entry] = []
        size_bytes = 0
        for key in keys:
            is_full = request.limit_bytes and size_bytes >= request.limit_bytes
            if is_full or (request.limit and len(found) == request.limit):
                return data, found, True
            entry = data[key]
            if request.keys_only:
                entry = kv_pb2.Entry(key=entry.key, seq=entry.seq)
            found.append(entry)
            size_bytes += len(entry.key) + len(entry.value)
        return data, found, False

    def _token(self, request: kv_pb2.ScanRequest, data: Data, key: bytes) -> bytes:
        """Return a page token behind `key`; that of a snapshot is valid on every server."""
        if request.header.snapshot_id:
            return b"at " + request.header.snapshot_id + key
        token = b"of %d " % id(self) + key
        self.state.views[token] = (data, key)
        return token

    async def _status(
        self, request: admin_pb2.StatusRequest, context: Context
    ) -> admin_pb2.StatusReply:
        failure = self.state.begin(request)
        if failure is not None:
            await end(context, failure)
        return admin_pb2.StatusReply(
            header=self.state.header(),
            version="0.0.7",
            url="memory://dict",
            uptime_ms=90_061_000,
            writer=admin_pb2.WriterStatus(commits=self.state.seq, queued_bytes_max=1 << 26),
            memtable=admin_pb2.MemtableStatus(keys=len(self.state.data), bytes=5_000_000),
            manifest=admin_pb2.ManifestStatus(manifest_id=3),
        )

    async def _stats(
        self, request: admin_pb2.StatsRequest, context: Context
    ) -> admin_pb2.StatsReply:
        failure = self.state.begin(request)
        if failure is not None:
            await end(context, failure)
        reply = self.state.stats.popleft() if self.state.stats else admin_pb2.StatsReply()
        reply.header.CopyFrom(self.state.header())
        return reply


async def received(server: DictServer, count: int) -> None:
    """Wait until `count` operations have arrived in sessions."""
    async with server.state.received:
        await server.state.received.wait_for(lambda: sum(map(len, server.state.messages)) >= count)


async def end(context: Context, failure: Failure) -> NoReturn:
    match failure:
        case Refused(status):
            await context.abort_with_status(rpc_status.to_status(status))
        case Broken(code, message):
            await context.abort(code, message)
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody sets this future")


def _operation_error(status: status_pb2.Status) -> kv_pb2.OperationError:
    error = kv_pb2.OperationError(code=status.code, message=status.message)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            error.reason = info.reason
            error.metadata.update(info.metadata)
        elif detail.Unpack(retry):
            error.retry_delay_ms = retry.retry_delay.ToMilliseconds()
    return error


def _serialized(reply: Message) -> bytes:
    return reply.SerializeToString()
