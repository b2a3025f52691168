"""Cost of the engine without a transport: prints its figures, asserts nothing about time.

Entries are 16 bytes of key and 100 bytes of value, on ``memory://``, and go through the services
that a transport calls. Rates are by processor time, so that other load of the machine hardly shows
in them; iterations of the event loop are by wall clock.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from shalekv.cli.process.gc_tuning import tune_garbage_collector
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.settings import GIB
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2
from shalekv.write.pending_replies import PendingReply
from tests.bench.sizes import sized
from tests.kit.processes.in_process import memory_store, real_runtime, running, serve_settings

pytestmark = pytest.mark.timeout(600)

CALL = Call(peer="bench")
VALUE = b"v" * 100
ENTRIES = sized(500_000, 4_000)
PUTS = sized(100_000, 2_000)
GETS = sized(100_000, 2_000)
BATCH = 1_000
CALLERS = 64
MEMORY = kv_pb2.DURABILITY_MEMORY


@asynccontextmanager
async def writing(objects: MemoryObjects) -> AsyncIterator[Writer]:
    """A writer that serves the database in these objects."""
    settings = serve_settings(writer={"memtable_bytes_max": 4 * GIB})
    with real_runtime(threads=2) as runtime:
        async with running(memory_store(objects), settings, runtime) as writer:
            tune_garbage_collector()
            yield writer


class Stopwatch:
    """Processor time since it was made."""

    def __init__(self) -> None:
        self.began = time.process_time()

    def tell(self, what: str, count: int) -> None:
        seconds = time.process_time() - self.began
        print(f"{what:40}{count / seconds:12,.0f} /s {seconds / count * 1e6:9.2f} us each")


class LoopTurns:
    """Measures the time that others wait for their turn of the event loop."""

    def __init__(self) -> None:
        self.turns_ms: list[float] = []
        self.task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0)
            self.turns_ms.append((time.perf_counter() - began) * 1e3)

    def tell(self, what: str) -> None:
        self.task.cancel()
        turns = sorted(self.turns_ms)
        late = turns[int(len(turns) * 0.999)]
        text = (
            f"longest {turns[-1]:.1f} ms, p99.9 {late:.1f} ms, median {turns[len(turns) // 2]:.2f}"
        )
        print(f"{what:40}{text}")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """No log lines between the figures, and the garbage collector as it was, afterwards."""
    thresholds = gc.get_threshold()
    print()
    with capture_logs():
        yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def puts_of(count: int, **fields: Any) -> list[kv_pb2.PutRequest]:
    random = Random(1)
    return [
        kv_pb2.PutRequest(key=random.randbytes(16), value=VALUE, **fields) for _ in range(count)
    ]


def batches_of(keys: list[bytes]) -> list[kv_pb2.WriteRequest]:
    """Requests to put these keys, 1,000 at a time."""
    changes = [kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=VALUE)) for key in keys]
    return [
        kv_pb2.WriteRequest(changes=changes[begin : begin + BATCH])
        for begin in range(0, len(changes), BATCH)
    ]


def random_keys(count: int, seed: int = 1) -> list[bytes]:
    random = Random(seed)
    return [random.randbytes(16) for _ in range(count)]


async def write(writer: Writer, batches: list[kv_pb2.WriteRequest]) -> None:
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(writer.kv.write(batch, CALL))
        if len(waiting) == 4:
            await waiting.pop(0)
    for answer in waiting:
        await answer


@pytest.mark.parametrize("together", [1, 100])
async def test_put_at_memory(together: int) -> None:
    """Puts that are acknowledged from memory, some in each turn of the loop, uploads included."""
    requests = puts_of(PUTS if together > 1 else PUTS // 5, durability=MEMORY)
    async with writing(MemoryObjects()) as writer:
        watch = Stopwatch()
        for number, request in enumerate(requests):
            writer.kv.put(request, CALL)
            if number % together == 0:
                await asyncio.sleep(0)
        watch.tell(f"puts at MEMORY, {together} a turn", len(requests))


async def test_durable_put() -> None:
    """Durable puts of 64 callers, each of which waits for its reply before the next."""
    requests = puts_of(PUTS)

    async def call(writer: Writer, part: list[kv_pb2.PutRequest]) -> None:
        for request in part:
            answer = writer.kv.put(request, CALL)
            assert isinstance(answer, PendingReply)
            await answer

    async with writing(MemoryObjects()) as writer:
        watch = Stopwatch()
        async with asyncio.TaskGroup() as tasks:
            for number in range(CALLERS):
                tasks.create_task(call(writer, requests[number::CALLERS]))
        watch.tell(f"durable puts, {CALLERS} callers", len(requests))


async def test_rows() -> None:
    """Batches into a growing memtable; then gets, scans, and a replay of what was written."""
    objects, keys = MemoryObjects(), random_keys(ENTRIES)
    batches = batches_of(keys)
    async with writing(objects) as writer:
        turns, watch = LoopTurns(), Stopwatch()
        await write(writer, batches)
        watch.tell("rows in durable batches of 1,000", ENTRIES)
        turns.tell("  turns of the loop")
        get(writer, keys)
        await scan(writer)
    batches.clear()
    watch = Stopwatch()
    async with writing(objects) as writer:
        watch.tell("rows replayed", ENTRIES)
        assert writer.engine.memtable.key_count == ENTRIES


def get(writer: Writer, keys: list[bytes]) -> None:
    wanted = Random(2).sample(keys, GETS)
    requests = [kv_pb2.GetRequest(key=key) for key in wanted]
    watch = Stopwatch()
    for request in requests:
        writer.kv.get(request, CALL)
    watch.tell("gets", len(wanted))
    many = [kv_pb2.BatchGetRequest(keys=wanted[n : n + 100]) for n in range(0, len(wanted), 100)]
    watch = Stopwatch()
    for batch in many:
        writer.kv.batch_get(batch, CALL)
    watch.tell("keys in gets of 100", len(wanted))


async def scan(writer: Writer) -> None:
    """Scans of everything in both directions, and of 100 rows from random keys."""
    for reverse in (False, True):
        turns, watch = LoopTurns(), Stopwatch()
        rows = await rows_of(writer, kv_pb2.ScanRequest(reverse=reverse))
        watch.tell("rows of a scan backwards" if reverse else "rows of a scan", rows)
        turns.tell("  turns of the loop")
    starts = random_keys(sized(1_000, 20), seed=3)
    requests = [
        kv_pb2.ScanRequest(range=kv_pb2.KeyRange(start=start), limit=100) for start in starts
    ]
    watch = Stopwatch()
    rows = sum([await rows_of(writer, request) for request in requests])
    watch.tell("rows of scans of 100", rows)
    print(f"{'  runs in the memtable':40}{writer.engine.memtable.run_count:12}")


async def rows_of(writer: Writer, request: kv_pb2.ScanRequest) -> int:
    return sum([len(reply.entries) async for reply in writer.kv.scan(request, CALL)])


async def test_longest_turn_of_the_largest_batch() -> None:
    """Batches of 10,000 changes, and of 10,000 keys to get, while others want their turns."""
    keys = random_keys(10_000)
    changes = [kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=VALUE)) for key in keys]
    async with writing(MemoryObjects()) as writer:
        turns = LoopTurns()
        for _ in range(sized(20, 2)):
            answer = writer.kv.write(kv_pb2.WriteRequest(changes=changes), CALL)
            assert isinstance(answer, PendingReply)
            await answer
        turns.tell("turns, batches of 10,000")
        turns = LoopTurns()
        for _ in range(sized(20, 2)):
            writer.kv.batch_get(kv_pb2.BatchGetRequest(keys=keys), CALL)
            await asyncio.sleep(0)
        turns.tell("turns, gets of 10,000")


@pytest.mark.parametrize("batch", [1, 10, BATCH])
def test_memory_of_entries(batch: int) -> None:
    """Memory of entries beyond what is accounted for them, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.bench.engine_memory",
        str(ENTRIES // sized(1, 4)),
        str(batch),
    ]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    print(result.stdout.strip())
