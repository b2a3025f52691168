"""A server that is killed under load and started again loses nothing that it acknowledged."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from shalekv.format import names
from shalekv.roles.writer import Writer
from shalekv.store.counting import CountingStore, Operation
from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryObjects
from tests.kit.processes.history import Fate, History
from tests.kit.processes.in_process import (
    memory_store,
    put_at,
    real_runtime,
    running,
    serve_settings,
)
from tests.kit.processes.load import Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import check_wal, read_wal, state_of

BURST_S = 0.4  # a kill comes at a random moment within it
BURST_DEADLINE_S = 200
KILLS = 7
KILLS_SOAK = 67
OPENED_OBJECTS = (100, 1000, 4000)
PARALLEL = [
    pytest.param((1,), id="one-in-flight"),
    pytest.param((4,), id="four-in-flight"),
    pytest.param((4, 1), id="four-then-one"),
]


async def kill_again_and_again(
    processes: Processes, folder: Path, *, kills: int, parallel: Sequence[int], seed: int
) -> History:
    """Load, kill and judge, so many times; `parallel` are the WAL objects in flight, in turn."""
    random = Random(seed)
    history = History(seed)
    url = f"file://{folder}"
    for number in range(kills + 1):
        in_flight = parallel[number % len(parallel)]
        server = await processes.serve(url, "--max-parallel-writes", str(in_flight))
        history.check_state(await read_state(server.listen))
        if number == kills:
            wal = read_wal(folder)
            check_wal(wal, history)
            assert await read_state(server.listen) == state_of(wal), f"seed {seed}"
            assert await server.stop() == 0, server.report()
            break
        load = Load(history, server.listen, random)
        loop = asyncio.get_running_loop()
        kill = loop.call_later(random.uniform(0, BURST_S), server.send, signal.SIGKILL)
        async with asyncio.timeout(BURST_DEADLINE_S):
            await load.run()
        assert kill.when() <= loop.time(), f"seed {seed}: {load.ended_by}\n{server.report()}"
        assert await server.exited() == -signal.SIGKILL, server.report()
    return history


@pytest.mark.parametrize("parallel", PARALLEL)
async def test_kill_loses_nothing(
    processes: Processes, tmp_path: Path, parallel: Sequence[int]
) -> None:
    """After kill -9 at random moments under load, no acknowledged write is missing, no batch is
    there by half, and nothing that was overwritten, deleted or lost comes back.
    """
    history = await kill_again_and_again(
        processes, tmp_path / "db", kills=KILLS, parallel=parallel, seed=len(parallel) + parallel[0]
    )
    sys.stdout.write(_summary(history))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parallel", PARALLEL)
async def test_kill_loses_nothing_for_long(
    processes: Processes, tmp_path: Path, parallel: Sequence[int]
) -> None:
    """As above, with a log that has grown through many kills."""
    history = await kill_again_and_again(
        processes,
        tmp_path / "db",
        kills=KILLS_SOAK,
        parallel=parallel,
        seed=100 + len(parallel) + parallel[0],
    )
    sys.stdout.write(_summary(history))


async def test_opening_reads_each_wal_object_once(tmp_path: Path) -> None:
    """Opening costs one read for each WAL object and nothing else that grows with the log."""
    objects = MemoryObjects()
    with real_runtime() as runtime:
        async with running(memory_store(objects), serve_settings(), runtime) as writer:
            for number in range(OPENED_OBJECTS[-1] - 1):  # the first object is a fence
                await put_at(writer, b"key/%d" % (number % 1000), b"value %d" % number)
        costs = []
        for count in OPENED_OBJECTS:
            folder = tmp_path / str(count)
            _copy(objects, folder, wal_objects=count)
            store = CountingStore(LocalStore(folder, runtime))
            began_s = time.monotonic()
            opened = await Writer.open(store, settings=serve_settings(), runtime=runtime)
            took_ms = (time.monotonic() - began_s) * 1000
            sys.stdout.write(f"opening with {count} WAL objects: {took_ms:.0f} ms\n")
            assert opened.engine.objects_replayed == count
            requests = {operation: each.requests for operation, each in store.counts.items()}
            requests[Operation.GET] -= count
            costs.append(requests)
    assert costs[0] == costs[1] == costs[2]


def _copy(objects: MemoryObjects, folder: Path, *, wal_objects: int) -> None:
    """Write a database out as files, its log cut behind the first `wal_objects`."""
    wal = [names.wal_name(wal_id) for wal_id in range(wal_objects)]
    manifests = [info.name for info in objects.page(names.MANIFEST_FOLDER, "")]
    for name in wal + manifests:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = objects.find(name)
        assert stored is not None
        path.write_bytes(stored.data)


def _summary(history: History) -> str:
    counts = {fate.value: len(history.of_fate(fate)) for fate in Fate}
    return f"seed {history.seed}: {counts}\n"
