"""A server for tests of watches: `KV.Watch` over a list of commits, with failures on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import grpc
from grpc_status import rpc_status

from shalekv.errors import ShaleError, WalCollected
from shalekv.rpc.status import operation_error, status_of
from shalekv.v1 import kv_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass
class History:
    """The commits of a database, which several servers may share: commit i has seq i + 1."""

    commits: list[list[kv_pb2.WatchChange]] = field(default_factory=list)
    oldest_seq: int = 1
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def seq(self) -> int:
        return len(self.commits)

    async def reaches(self, seq: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.seq >= seq)

    async def put(self, *keys: bytes, value: bytes = b"v") -> int:
        kind = kv_pb2.WatchChange.Kind.KIND_PUT
        async with self.changed:
            seq = self.seq + 1
            entries = [kv_pb2.Entry(key=key, value=value, seq=seq) for key in keys]
            self.commits.append([kv_pb2.WatchChange(kind=kind, entry=each) for each in entries])
            self.changed.notify_all()
        return seq


class WatchServer:
    """A running server; use it as an asynchronous context manager."""

    def __init__(self, history: History, *, changes_max: int = 2) -> None:
        self.history = history
        self.changes_max = changes_max
        self.requests: list[kv_pb2.WatchRequest] = []
        self.streams = 0  # begun
        self.open_streams = 0
        self.news = asyncio.Condition()  # a request has come, or a stream begins or ends
        self.refusals: list[ShaleError] = []  # of the next streams, at their beginning
        self.closures: list[ShaleError] = []  # of the next watches, in place of opening them
        self.cut_after: int | None = None  # break every stream after so many replies
        self.is_silent = False  # opens no watch
        self.address = ""
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._watch,
            kv_pb2.WatchRequest.FromString,
            kv_pb2.WatchReply.SerializeToString,
        )
        methods = grpc.method_handlers_generic_handler("shalekv.v1.KV", {"Watch": handler})
        self._server.add_generic_rpc_handlers([methods])

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def stop(self) -> None:
        await self._server.stop(None)

    async def until(self, *, requests: int = 0, open_streams: int | None = None) -> None:
        """Wait until so many requests have come, or so many streams are open."""
        async with self.news:
            await self.news.wait_for(
                lambda: len(self.requests) >= requests and open_streams in {None, self.open_streams}
            )

    @property
    def creates(self) -> Sequence[kv_pb2.WatchCreate]:
        return [each.create for each in self.requests if each.HasField("create")]

    @property
    def acks(self) -> Sequence[int]:
        return [each.ack.seq for each in self.requests if each.HasField("ack")]

    async def _watch(self, requests: AsyncIterator[kv_pb2.WatchRequest], context: Context) -> None:
        self.streams += 1
        if self.refusals:
            status = status_of(self.refusals.pop(0))
            await context.abort_with_status(rpc_status.to_status(status))
        self.open_streams += 1
        try:
            await _Stream(self, context).run(requests)
        finally:
            self.open_streams -= 1
            async with self.news:
                self.news.notify_all()


class _Cut(Exception):
    """Raised to break the stream."""


class _Stream:
    """One call."""

    def __init__(self, server: WatchServer, context: Context) -> None:
        self._server = server
        self._context = context
        self._left = server.cut_after
        self._writing = asyncio.Lock()
        self._watches: dict[int, asyncio.Task[None]] = {}

    async def run(self, requests: AsyncIterator[kv_pb2.WatchRequest]) -> None:
        """Answer until everything is sent and all watches are closed, or until the stream
        breaks.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    async with self._server.news:
                        self._server.requests.append(request)
                        self._server.news.notify_all()
                    await self._answer(request, tasks)
        except* _Cut:
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is too old")

    async def _answer(self, request: kv_pb2.WatchRequest, tasks: asyncio.TaskGroup) -> None:
        if request.HasField("create"):
            number = request.create.watch_id
            self._watches[number] = tasks.create_task(self._tell(request.create))
        elif request.HasField("cancel"):
            number = request.cancel.watch_id
            task = self._watches.pop(number, None)
            if task is not None:
                async with self._writing:  # grpc would go on with a write that is cancelled
                    task.cancel()
            await self._write(number, closed=kv_pb2.OperationError())

    async def _tell(self, create: kv_pb2.WatchCreate) -> None:
        history, number = self._server.history, create.watch_id
        if self._server.is_silent:
            return
        start = create.start_seq or history.seq + 1
        failure: ShaleError | None = None
        if self._server.closures:
            failure = self._server.closures.pop(0)
        elif start < history.oldest_seq:
            failure = WalCollected(start_seq=start, oldest_seq=history.oldest_seq)
        if failure is not None:
            await self._write(number, closed=operation_error(status_of(failure)))
            return
        await self._write(number, opened_at_seq=start)
        seq = start
        while True:
            await history.reaches(seq)
            changes = [
                each
                for each in history.commits[seq - 1]
                if each.entry.key.startswith(create.range.prefix)
            ]
            await self._write_commit(number, seq, changes)
            seq += 1

    async def _write_commit(
        self, number: int, seq: int, changes: Sequence[kv_pb2.WatchChange]
    ) -> None:
        size = self._server.changes_max
        if not changes:
            await self._write(number, progress_seq=seq)
        for at in range(0, len(changes), size):
            part = changes[at : at + size]
            more = at + size < len(changes)
            commit = kv_pb2.WatchCommit(seq=seq, wal_id=seq, changes=part, more=more)
            await self._write(number, commit=commit)

    async def _write(self, number: int, **event: Any) -> None:
        async with self._writing:
            if self._left is not None:
                if not self._left:
                    raise _Cut
                self._left -= 1
            await self._context.write(kv_pb2.WatchReply(watch_id=number, **event))
