"""Readers in virtual time, and calls to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from shalekv.roles.reader import Reader
from shalekv.roles.service import Call
from shalekv.settings import CacheSettings, ReaderSettings, ReadSettings, UrlSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.replica import (
    BY_HAND,
    AskedStore,
    ReplicaGround,
)

NO_CACHE = CacheSettings().model_copy(update={"block_cache_bytes": 0, "metadata_cache_bytes": 0})


async def opened(ground: ReplicaGround, store: AskedStore | None = None, **settings: Any) -> Reader:
    """A reader that has joined."""
    read = ReadSettings(
        database=UrlSettings(url="memory://replica"),
        cache=NO_CACHE,
        reader=ReaderSettings.model_validate(BY_HAND | settings),
    )
    return await Reader.open(
        store or AskedStore(ground), settings=read, runtime=ground.local_runtime()
    )


@asynccontextmanager
async def running(reader: Reader) -> AsyncIterator[Reader]:
    """Let it follow, then end."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reader.run())
        try:
            yield reader
        finally:
            reader.close()


async def get(reader: Reader, key: bytes, call: Call | None = None, **header: Any) -> Any:
    """The reply to a get."""
    request = kv_pb2.GetRequest(header=kv_pb2.RequestHeader(**header), key=key)
    answer = reader.kv.get(request, call or Call())
    return await answer if isinstance(answer, Awaitable) else answer
