"""The path of a durable put: few frames from its handler to the object store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType

import grpc
import pytest

from shalekv.rpc.server import Server
from shalekv.settings import StoreSettings
from shalekv.store.local import LocalStore
from shalekv.store.opening import open_store
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv.write.group_commit import CommitQueue
from tests.kit.in_process_cluster import running
from tests.kit.processes.in_process import open_writer, real_runtime, serve_settings
from tests.kit.serving.rpc import server_settings

FRONT_FRAMES_MAX = 3
FRAMES_MAX = 6
TRANSPORT = "shalekv.rpc."
PUT = kv_pb2.PutRequest(key=b"key", value=b"value")
KEYED = kv_pb2.PutRequest(
    key=b"key", value=b"value", header=kv_pb2.RequestHeader(idempotency_key=bytes(16))
)


@contextmanager
def stacks_of(*functions: CodeType) -> Iterator[dict[CodeType, list[str]]]:
    """Record the frames of the product that lead to the first call of each function."""
    found: dict[CodeType, list[str]] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in functions and frame.f_code not in found:
            found[frame.f_code] = [*_callers(frame)][::-1]

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _callers(frame: FrameType) -> Iterator[str]:
    caller = frame.f_back
    while caller is not None:
        module = str(caller.f_globals.get("__name__", ""))
        if module.startswith("shalekv."):
            yield f"{module}: {caller.f_code.co_qualname}"
        caller = caller.f_back


@asynccontextmanager
async def serving_files(folder: Path) -> AsyncIterator[kv_pb2_grpc.KVStub]:
    """Serve a database in `folder` on a port of this machine."""
    with real_runtime() as runtime:
        store = open_store(folder.as_uri(), runtime, StoreSettings())
        writer = await open_writer(store, serve_settings(), runtime)
        server = Server(server_settings(), runtime)
        async with running(writer):
            await server.start(writer.kv, writer.admin, writer.watches)
            async with grpc.aio.insecure_channel(server.listen) as channel:
                yield kv_pb2_grpc.KVStub(channel)
            await server.stop()
            writer.close()
        await store.close()


@pytest.mark.parametrize("put", [PUT, KEYED], ids=["plain", "with a key"])
@pytest.mark.parametrize("method", ["Put", "Session"])
async def test_a_durable_put_takes_few_frames(
    tmp_path: Path, put: kv_pb2.PutRequest, method: str
) -> None:
    """From the handler to the store there are few frames of the product.

    Frames of the transport and those that were on the stack before it are not counted.
    """
    queued, created = CommitQueue.append.__code__, LocalStore.create.__code__
    async with asyncio.timeout(20), serving_files(tmp_path) as kv:
        await kv.Put(kv_pb2.PutRequest(key=b"first", value=b""))
        with stacks_of(queued, created) as stacks:
            if method == "Session":
                operation = kv_pb2.SessionOperation(id=1, put=put)
                await anext(
                    aiter(kv.Session(iter([kv_pb2.SessionRequest(operations=[operation])])))
                )
            else:
                await kv.Put(put)
    transport = [each for each in stacks[queued] if each.startswith(TRANSPORT)]
    assert transport, "the put has not come through a handler"
    front = [each for each in stacks[queued] if not each.startswith(TRANSPORT)]
    back = stacks[created]
    path = "\n".join(["", *front, "-- queue --", *back, f"(transport: {', '.join(transport)})"])
    assert len(front) <= FRONT_FRAMES_MAX, path
    assert len(front) + len(back) <= FRAMES_MAX, path
