"""How long the event loop of a writer is kept busy by one callback, while all else runs.

The writer runs in this process, on an event loop that measures the CPU time of each callback; its
compactor and collector are processes of their own, as in `shalekv serve`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from sys import executable, getswitchinterval, setswitchinterval

from shalekv.cli.garbage import tame_garbage_collector
from shalekv.roles.service import Call
from shalekv.roles.writer import Writer
from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from shalekv.v1 import kv_pb2
from tests.bench.sizes import sized
from tests.kit.processes.in_process import real_runtime, running, serve_settings

WRITERS = 4
BATCH = 100
WRITTEN_BYTES = sized(400 << 20, 2 << 20)  # accounted: 64 MiB fill and go several times
MEMTABLE_BYTES = 128 << 20
ENTRY_BYTES = 436  # accounted for 16 + 100 bytes
KEYS = 1 << 22
# The readers here have no network to wait for, so the loop is never idle: its thread takes the GIL
# back from each `select` before one that writes the log wakes up, and does so more often than that
# one asks for it (every 5 ms by default). Some commits then took seconds.
SWITCH_S = 0.0002
CALL = Call()


@dataclass
class Callbacks:
    """CPU time of the callbacks of an event loop, by what ran."""

    took_ms: list[float] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, took_ms: float) -> None:
        """One callback has run."""
        self.took_ms.append(took_ms)
        self.longest[name] = max(self.longest.get(name, 0.0), took_ms)


@contextmanager
def collections() -> Iterator[Callable[[], float]]:
    """How long Python's own garbage collector has run, milliseconds of CPU time."""
    spent_ms = began_ms = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal spent_ms, began_ms
        now_ms = time.thread_time() * 1_000
        if phase == "start":
            began_ms = now_ms
        else:
            spent_ms += now_ms - began_ms

    gc.callbacks.append(note)
    try:
        yield lambda: spent_ms
    finally:
        gc.callbacks.remove(note)


@contextmanager
def measured() -> Iterator[Callbacks]:
    """Measure every callback of asyncio's own event loop."""
    callbacks = Callbacks()
    run = asyncio.Handle._run  # noqa: SLF001 - there is no other place where all of them pass
    with collections() as collected_ms:

        def _run(handle: asyncio.Handle) -> None:
            collected_before_ms, began_s = collected_ms(), time.thread_time()
            run(handle)
            took_ms = (time.thread_time() - began_s) * 1_000
            spent_ms = collected_ms() - collected_before_ms
            name = _name(handle) if took_ms > 1 else "short"
            callbacks.add(f"{name}, garbage collection" if spent_ms > 1 else name, took_ms)

        asyncio.Handle._run = _run  # type: ignore[method-assign,assignment] # noqa: SLF001 - as above
        try:
            yield callbacks
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign] # noqa: SLF001 - as above


def _name(handle: asyncio.Handle) -> str:
    callback: object = getattr(handle, "_callback", None)
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"{owner.get_name()}: {getattr(owner.get_coro(), '__qualname__', '')}"
    return str(callback)


@asynccontextmanager
async def child(role: str, url: str, *flags: str) -> AsyncIterator[Process]:
    """`shalekv compactor` or `shalekv collector`, until its pipe is closed."""
    arguments = ("-m", "shalekv.cli.main", role, "--url", url, "--parent-pipe", *flags)
    process = await asyncio.create_subprocess_exec(
        executable, *arguments, stdin=PIPE, stderr=DEVNULL, preexec_fn=lambda: os.nice(10)
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def write(writer: Writer, random: Random, total: list[int]) -> None:
    """Write batches until enough was written."""
    while total[0] > 0:
        total[0] -= BATCH * ENTRY_BYTES
        request = kv_pb2.WriteRequest()
        for _ in range(BATCH):
            key = b"%016d" % random.randrange(KEYS)
            request.changes.add().put.CopyFrom(
                kv_pb2.PutChange(key=key, value=random.randbytes(100))
            )
        answer = writer.kv.write(request, CALL)
        if not isinstance(answer, kv_pb2.WriteReply):
            await answer


async def read(writer: Writer, random: Random) -> None:
    """Read keys, and now and then a range, until cancelled."""
    while True:
        keys = [b"%016d" % random.randrange(KEYS) for _ in range(20)]
        answer = writer.kv.batch_get(kv_pb2.BatchGetRequest(keys=keys), CALL)
        if not isinstance(answer, kv_pb2.BatchGetReply):
            await answer
        scan = kv_pb2.ScanRequest(range=kv_pb2.KeyRange(start=keys[0]), limit=1_000)
        async for _ in writer.kv.scan(scan, CALL):
            pass
        await asyncio.sleep(0)


async def campaign(url: str) -> Callbacks:
    """Fill and read a database while it is compacted."""
    total = [WRITTEN_BYTES]
    settings = serve_settings(
        writer={"memtable_bytes_max": MEMTABLE_BYTES, "queue_wait_ms": 60_000}
    )
    compactor = child("compactor", url, "--wal-trigger-bytes", str(4 << 20))
    collector = child("collector", url, "--collect-interval-ms", "1000", "--collect-age-s", "1")
    with real_runtime() as runtime, measured() as callbacks:
        store = open_store(url, runtime, StoreSettings())
        async with running(store, settings, runtime) as writer, compactor, collector:
            tame_garbage_collector()
            reading = asyncio.create_task(read(writer, Random(2)), name="read")
            async with asyncio.TaskGroup() as writing:
                for number in range(WRITERS):
                    writing.create_task(write(writer, Random(number), total), name="write")
            reading.cancel()
        await writer.leave()
        await store.close()
    return callbacks


def test_longest_callback(tmp_path: Path) -> None:
    """CPU time of the callbacks of the writer's event loop while memtables come and go."""
    switch_s = getswitchinterval()
    setswitchinterval(SWITCH_S)
    try:
        callbacks = asyncio.run(campaign(f"file://{tmp_path}/db"))
    finally:
        setswitchinterval(switch_s)
    ordered = sorted(callbacks.took_ms)
    print(f"\n{len(ordered):,} callbacks, CPU time: median {ordered[len(ordered) // 2]:.3f} ms, ")
    print(f"p99.9 {ordered[int(len(ordered) * 0.999)]:.1f} ms, longest {ordered[-1]:.1f} ms")
    for name, took_ms in sorted(callbacks.longest.items(), key=lambda item: -item[1])[:8]:
        print(f"  {took_ms:6.1f} ms  {name}")
