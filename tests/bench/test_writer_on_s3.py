"""What a durable put takes through a writer on S3, beside a bare conditional PUT of the store.

The writer is in this process, called without a transport, at default settings. Nothing is asserted
about time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest
import uvloop
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.roles.service import Call
from shalekv.roles.writer import CHARGED_FLUSH_INTERVAL_MS, Writer
from shalekv.store.api import Created, ObjectStore
from shalekv.store.opening import open_store
from shalekv.v1 import kv_pb2
from tests.bench.interleaved import load
from tests.bench.sizes import sized
from tests.kit.processes.in_process import real_runtime, running, serve_settings
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.timeout(600)

URL = f"s3://{BUCKET}/writer-on-s3"
LONE_PUTS = sized(100, 3)
CLIENTS = sized(64, 8)
PUTS_PER_CLIENT = sized(20, 2)
IDLE_MS = 60  # longer than WAL objects are apart: the next put finds an idle log
VALUE = bytes(100)
CALL = Call(peer="bench")


@asynccontextmanager
async def writing(server: S3Server) -> AsyncIterator[tuple[Writer, ObjectStore]]:
    """A writer of a new database, and the store that it writes to."""
    settings = serve_settings(
        database={"url": URL}, store={"endpoint_url": server.endpoint}, server={}
    )
    with real_runtime(threads=2) as runtime:
        store = open_store(URL, runtime, settings.store)
        async with running(store, settings, runtime) as writer:
            yield writer, store
        await writer.leave()
        await store.close()


async def took_ms(work: Awaitable[object]) -> float:
    """How long it took."""
    began_s = time.perf_counter()
    await work
    return (time.perf_counter() - began_s) * 1000


async def put(writer: Writer, number: int) -> None:
    """A durable put."""
    answer = writer.kv.put(kv_pb2.PutRequest(key=b"%016d" % number, value=VALUE), CALL)
    if not isinstance(answer, kv_pb2.PutReply):
        await answer


async def create(store: ObjectStore, number: int, data: bytes) -> None:
    """A bare conditional PUT of an object as large as that of the log."""
    assert await store.create(f"levels/{number}", data) == Created()


def test_durable_put(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints the latency of lone puts in bare conditional PUTs, and what 64 clients get."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)

    async def campaign() -> None:
        async with writing(s3_server) as (writer, store):
            await lone_puts(writer, store)
            await many_clients(writer, store)

    with capture_logs():
        uvloop.run(campaign())


async def lone_puts(writer: Writer, store: ObjectStore) -> None:
    """Puts into an idle log, each beside a bare PUT."""
    await put(writer, 0)
    wal = [info async for info in store.list("wal/")]
    data = os.urandom(wal[-1].size_bytes)
    lone_ms, bare_ms = [], []
    for number in range(LONE_PUTS):
        await LoopClock().sleep_ms(IDLE_MS)  # before both, so that both find everything as cold
        lone_ms.append(await took_ms(put(writer, number)))
        await LoopClock().sleep_ms(IDLE_MS)
        bare_ms.append(await took_ms(create(store, number, data)))
    lone, bare = statistics.median(lone_ms), statistics.median(bare_ms)
    print(f"\n{load()}")
    print(f"bare PUT of {len(data)} bytes {bare:8.2f} ms")
    print(f"lone put, durable     {lone:8.2f} ms {lone / bare:6.2f} bare PUTs")


async def many_clients(writer: Writer, store: ObjectStore) -> None:
    """Clients, each of which waits for its reply before the next put."""
    before = len([info async for info in store.list("wal/")])
    latencies_ms: list[float] = []

    async def client(number: int) -> None:
        for n in range(PUTS_PER_CLIENT):
            key = number * PUTS_PER_CLIENT + n
            latencies_ms.append(await took_ms(put(writer, key)))

    everything_ms = await took_ms(asyncio.gather(*(client(number) for number in range(CLIENTS))))
    objects = len([info async for info in store.list("wal/")]) - before
    count = CLIENTS * PUTS_PER_CLIENT
    print(
        f"{CLIENTS} clients {count / everything_ms * 1000:10,.0f} puts/s, median "
        f"{statistics.median(latencies_ms):.1f} ms each, {count / objects:.1f} puts in each PUT; "
        f"WAL objects are {CHARGED_FLUSH_INTERVAL_MS} ms apart"
    )
