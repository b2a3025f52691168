"""Effect of more WAL objects in flight: latency, throughput and requests, by `k`.

The store is in memory and has the latency of a network; the writer is in this process, at default
settings except for `max_parallel_writes`. Nothing is asserted about time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from random import Random
from typing import Any, TypeAlias

import pytest
import uvloop
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.format.names import WAL_FOLDER
from shalekv.server.database import create_database
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.settings import DatabaseSettings, StoreSettings, WriterConfig, WriterSettings
from shalekv.v1 import kv_pb2
from tests.bench.interleaved import load
from tests.bench.sizes import sized
from tests.kit.processes.in_process import real_runtime
from tests.kit.slow_store import SlowStore

pytestmark = pytest.mark.timeout(600)

IN_FLIGHT = (1, 2, 4)
CREATE_MS = sized((25.0, 100.0), (1.0,))
SPACINGS_MS = sized((0, 50), (0,))
CLIENTS = 64  # each waits for its replies
PUTS = sized(1_920, 128)
ARRIVALS_PER_S = sized(200.0, 2_000.0)  # of puts that do not wait for earlier ones
VALUE = bytes(100)
CALL = Call(peer="bench")
Put: TypeAlias = Callable[[bytes], Coroutine[Any, Any, None]]
Load: TypeAlias = Callable[[Put], Awaitable[None]]


async def clients_that_wait(put: Put) -> None:
    """Each sends its next put when it has the reply to the one before."""

    async def client(number: int) -> None:
        for n in range(PUTS // CLIENTS):
            await put(b"%04d %06d" % (number, n))

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


async def arrivals(put: Put) -> None:
    """Puts of very many clients come at random moments."""
    random, clock = Random(1), LoopClock()
    async with asyncio.TaskGroup() as tasks:
        for number in range(PUTS // 4):
            await clock.sleep_ms(random.expovariate(ARRIVALS_PER_S / 1_000))
            tasks.create_task(put(b"%010d" % number))


LOADS: Mapping[str, Load] = {f"{CLIENTS} clients": clients_that_wait, "arrivals": arrivals}


def test_more_objects_in_flight() -> None:
    """Prints, for each store and load, what each width gives beside a width of 1."""
    print(f"\n{load()}")
    print("  store  spacing  load         k  puts/s  x k=1  mean ms  p99 ms  x k=1  puts in a PUT")
    with capture_logs():
        for create_ms in CREATE_MS:
            for spacing_ms in SPACINGS_MS:
                for name in LOADS:
                    uvloop.run(compare(create_ms, spacing_ms, name))


async def compare(create_ms: float, spacing_ms: int, name: str) -> None:
    rate_alone = mean_alone_ms = 0.0
    for in_flight in IN_FLIGHT:
        latencies_ms, wall_s, objects = await measure(create_ms, spacing_ms, name, in_flight)
        rate, mean_ms = len(latencies_ms) / wall_s, statistics.fmean(latencies_ms)
        rate_alone, mean_alone_ms = rate_alone or rate, mean_alone_ms or mean_ms
        p99_ms = sorted(latencies_ms)[len(latencies_ms) * 99 // 100]
        print(
            f"{create_ms:4.0f} ms {spacing_ms:5} ms  {name:10} {in_flight:3} {rate:7,.0f} "
            f"{rate / rate_alone:6.2f} {mean_ms:8.1f} {p99_ms:7.1f} {mean_ms / mean_alone_ms:6.2f} "
            f"{len(latencies_ms) / objects:14.1f}"
        )


async def measure(
    create_ms: float, spacing_ms: int, name: str, in_flight: int
) -> tuple[list[float], float, int]:
    """The latencies of all puts, how long they took together, and in how many objects they are."""
    store = SlowStore()
    latencies_ms: list[float] = []
    with real_runtime() as runtime:
        await create_database(store, runtime, StoreSettings())
        settings = WriterConfig(
            database=DatabaseSettings(url="memory://bench"),
            writer=WriterSettings(max_parallel_writes=in_flight, flush_interval_ms=spacing_ms),
        )
        writer = await Writer.open(store, settings=settings, runtime=runtime)
        store.create_ms = create_ms

        async def put(key: bytes) -> None:
            began_s = time.perf_counter()
            answer = writer.kv.put(kv_pb2.PutRequest(key=key, value=VALUE), CALL)
            if not isinstance(answer, kv_pb2.PutReply):
                await answer
            latencies_ms.append((time.perf_counter() - began_s) * 1_000)

        before = len([info async for info in store.list(WAL_FOLDER)])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            began_s = time.perf_counter()
            await LOADS[name](put)
            wall_s = time.perf_counter() - began_s
            writer.close()
        await writer.release()
        objects = len([info async for info in store.list(WAL_FOLDER)]) - before
        return latencies_ms, wall_s, objects
