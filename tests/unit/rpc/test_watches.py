"""Streams of watches between grpc and the seam."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from shalekv.errors import Fenced
from shalekv.v1 import kv_pb2
from tests.kit.serving.rpc import failure, serving


def create(watch_id: int) -> kv_pb2.WatchRequest:
    return kv_pb2.WatchRequest(create=kv_pb2.WatchCreate(watch_id=watch_id))


async def endless() -> AsyncIterator[kv_pb2.WatchRequest]:
    yield create(7)
    await asyncio.Event().wait()


async def test_stream_fails_with_its_error() -> None:
    """What the stream refuses is told as of any other call, and the stream is left."""
    async with serving() as it:
        failed = await failure(it.kv.Watch(iter([create(7), kv_pb2.WatchRequest()])))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.info is not None
        assert dict(failed.info.metadata) == {"field": "request"}
        await it.watches.streams[0].left.wait()


async def test_client_that_goes_cuts_nothing_off() -> None:
    """What a stream has to do at its end is done, although its client does not wait for that."""
    async with serving() as it:
        watch = it.kv.Watch(endless())
        await anext(aiter(watch))
        (stream,) = it.watches.streams
        stream.may_leave.clear()
        stream.end()
        await stream.leaving.wait()
        watch.cancel()
        await failure(it.kv.Watch(iter([kv_pb2.WatchRequest()])))  # noticed by then
        stream.may_leave.set()
        async with asyncio.timeout(10):
            await stream.left.wait()


async def test_server_waits_for_what_streams_have_to_do() -> None:
    """A server that stops lets streams come to their end, which their clients do not see."""
    async with serving() as it:
        watch = it.kv.Watch(endless())
        await anext(aiter(watch))
        (stream,) = it.watches.streams
        stream.may_leave.clear()
        stream.end()
        await stream.leaving.wait()
        watch.cancel()
        stopping = asyncio.create_task(it.server.stop())
        asyncio.get_running_loop().call_later(0.05, stream.may_leave.set)
        await stopping
        assert stream.left.is_set()


async def test_streams_end_with_their_server() -> None:
    """They would never end: who stops serving ends them with its reason, and waits for none."""
    async with serving() as it:
        watch = it.kv.Watch(endless())
        await anext(aiter(watch))
        async with asyncio.timeout(10):
            await it.server.drain(60_000)
            await it.server.refuse(Fenced("epoch 8 has taken over", own_epoch=7, newer_epoch=8))
            failed = await failure(watch)
        assert failed.info is not None
        assert failed.info.reason == "FENCED"
