"""Watches behind the seam: each is open at once, at commit 1, and nothing ever happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from shalekv.errors import InvalidRequest, ShaleError
from shalekv.v1 import kv_pb2


class MemoryWatches:
    """Answers `WatchService`, and keeps its streams for who looks at them."""

    def __init__(self) -> None:
        self.streams: list[MemoryStream] = []

    def open(self, _describe: Callable[[BaseException], kv_pb2.OperationError]) -> MemoryStream:
        self.streams.append(MemoryStream())
        return self.streams[-1]


class MemoryStream:
    """Answers `WatchStream`: what is no create ends it."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[kv_pb2.WatchReply | ShaleError | None] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.left = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.may_leave.set()
        self.leaving = asyncio.Event()

    async def read(
        self, requests: AsyncIterator[kv_pb2.WatchRequest], _tasks: asyncio.TaskGroup
    ) -> None:
        async for request in requests:
            if not request.HasField("create"):
                self.refuse(InvalidRequest("request", "is no create"))
                return
            told = kv_pb2.WatchReply(watch_id=request.create.watch_id, opened_at_seq=1)
            self._told.put_nowait(told)
        self._told.put_nowait(None)

    async def replies(self) -> AsyncIterator[kv_pb2.WatchReply]:
        while (told := await self._told.get()) is not None:
            if isinstance(told, ShaleError):
                raise told
            yield told

    def refuse(self, error: ShaleError) -> None:
        self._told.put_nowait(error)

    def close(self) -> None:
        self.closed.set()

    def end(self) -> None:
        self._told.put_nowait(None)

    async def leave(self) -> None:
        self.leaving.set()
        await self.may_leave.wait()
        self.left.set()
