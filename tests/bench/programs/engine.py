"""Measurement of the engine without a transport, in a process of its own: prints JSON.

    engine.py ENTRIES

Entries are 16 bytes of key and 100 bytes of value, on memory://, and go through the services that
a transport calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random

import structlog
import uvloop

from shalekv.cli.process.gc_tuning import tune_garbage_collector
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.settings import GIB
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2
from tests.bench.programs.meter import Meter
from tests.kit.processes.in_process import memory_store, real_runtime, running, serve_settings
from tests.kit.serving.answers import replied

CALL = Call(peer="bench")
VALUE = b"v" * 100
BATCH = 1_000
CALLERS = 64
AT_ONCE = 4
TOGETHER = 100
MEMORY = kv_pb2.DURABILITY_MEMORY


async def measure(entries: int) -> dict[str, dict[str, float]]:
    """Return the cost of each kind of operation."""
    found: dict[str, dict[str, float]] = {}
    keys = [Random(number).randbytes(16) for number in range(entries)]
    settings = serve_settings(writer={"memtable_bytes_max": 4 * GIB})
    with real_runtime(threads=2) as runtime:
        async with running(memory_store(MemoryObjects()), settings, runtime) as writer:
            tune_garbage_collector()
            puts = keys[: entries // 10]
            for name in ("warm-up", "memory put"):
                found[name] = await _memory_puts(writer, puts)
            found["durable put"] = await _durable_puts(writer, puts)
            found["batch put"] = await _batches(writer, keys)
            wanted = Random(2).sample(keys, entries // 5)
            found["get"] = await _gets(writer, wanted)
            found["key of a get of 100"] = await _batch_gets(writer, wanted)
            with Meter(entries) as meter:
                replies = [each async for each in writer.kv.scan(kv_pb2.ScanRequest(), CALL)]
            rows = sum(len(kv_pb2.ScanReply.FromString(each).entries) for each in replies)
            assert rows == entries, rows
            found["scan"] = meter.figures
    return found


async def _memory_puts(writer: Writer, keys: list[bytes]) -> dict[str, float]:
    """Puts that are acknowledged from memory, 100 in a turn of the loop; uploads included."""
    requests = [kv_pb2.PutRequest(key=key, value=VALUE, durability=MEMORY) for key in keys]
    with Meter(len(keys)) as meter:
        for number, request in enumerate(requests):
            writer.kv.put(request, CALL)
            if number % TOGETHER == 0:
                await asyncio.sleep(0)
    return meter.figures


async def _durable_puts(writer: Writer, keys: list[bytes]) -> dict[str, float]:
    """Durable puts of 64 callers, each of which waits for its reply before the next."""
    requests = iter([kv_pb2.PutRequest(key=key, value=VALUE) for key in keys])

    async def caller() -> None:
        for request in requests:
            await replied(writer.kv.put(request, CALL))

    with Meter(len(keys)) as meter:
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return meter.figures


async def _batches(writer: Writer, keys: list[bytes]) -> dict[str, float]:
    changes = [kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=VALUE)) for key in keys]
    requests = iter(
        [
            kv_pb2.WriteRequest(changes=changes[at : at + BATCH])
            for at in range(0, len(changes), BATCH)
        ]
    )

    async def caller() -> None:
        for request in requests:
            await replied(writer.kv.write(request, CALL))

    with Meter(len(keys)) as meter:
        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return meter.figures


async def _gets(writer: Writer, keys: list[bytes]) -> dict[str, float]:
    requests = [kv_pb2.GetRequest(key=key) for key in keys]
    with Meter(len(keys)) as meter:
        for request in requests:
            await replied(writer.kv.get(request, CALL))
    return meter.figures


async def _batch_gets(writer: Writer, keys: list[bytes]) -> dict[str, float]:
    requests = [
        kv_pb2.BatchGetRequest(keys=keys[at : at + TOGETHER])
        for at in range(0, len(keys), TOGETHER)
    ]
    with Meter(len(keys)) as meter:
        for request in requests:
            await replied(writer.kv.batch_get(request, CALL))
    return meter.figures


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # no log lines
    print(json.dumps(uvloop.run(measure(int(sys.argv[1])))))
