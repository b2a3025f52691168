"""Safekeepers are lost under load: a minority is not noticed; a majority is told."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from random import Random

from shalekv_client import Client, Durability, NotApplied, OutcomeUnknown, RetryPolicy
from tests.kit.processes.history import Fate, History
from tests.kit.processes.load import TIMEOUT_MS, Load, read_state, send
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import LENIENT, Cluster

ONE_ATTEMPT = RetryPolicy(attempts_max=1)
WRITES = 150  # in each part of a test
PATIENCE_S = 200
SECONDS = 4  # of each measurement
# Longer than a busy machine holds anybody up: while a majority is there no write may fail.
TELLING = ("--quorum-timeout-ms", "10000")


async def test_two_of_five_are_lost_under_load(processes: Processes, tmp_path: Path) -> None:
    """No write fails while two of five are killed; with the third killed writes are refused as
    unavailable and reads go on; with one back writes go on by themselves; nothing is lost.
    """
    history, random = History(5), Random(5)
    cluster = Cluster(processes, tmp_path, count=5)
    await cluster.start()
    writer = await cluster.serve(*TELLING)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        load = Load(history, writer.listen, random)
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        before = await _latencies(history, writer.listen)
        await cluster.kill([0, 3])
        after = await _latencies(history, writer.listen)
        assert await load.acknowledged(2 * WRITES), load.reasons()
        load.stop()
    assert not load.ended_by, load.reasons()
    sys.stdout.write(f"p99 of puts under load: {before}; from the kill of two on: {after}\n")

    await cluster.kill([4])
    assert await _refused(history, writer.listen) == "QUORUM_UNAVAILABLE"
    history.check_state(await read_state(writer.listen))

    await cluster.start_node(0)
    await _accepted(history, writer.listen)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        load = Load(history, writer.listen, random)
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        load.stop()
    assert await writer.kill()
    writer = await cluster.serve(create=False)
    history.check_state(await read_state(writer.listen))
    assert await writer.stop() == 0, writer.report()


async def test_whatever_is_killed_comes_back_with_everything(
    processes: Processes, tmp_path: Path
) -> None:
    """All safekeepers and the writer are killed at once under load, again and again."""
    history, random = History(3), Random(3)
    cluster = Cluster(processes, tmp_path, count=3)
    await cluster.start()
    for _ in range(4):
        writer = await cluster.serve(*LENIENT)
        history.check_state(await read_state(writer.listen))
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            load = Load(history, writer.listen, random)
            tasks.create_task(load.run())
            assert await load.acknowledged(WRITES), load.reasons()
            await asyncio.gather(cluster.kill(range(3)), writer.kill())
        await asyncio.gather(*(cluster.start_node(index) for index in range(3)))
    writer = await cluster.serve(create=False)
    history.check_state(await read_state(writer.listen))


async def test_replies_say_which_durability_was_reached(
    processes: Processes, tmp_path: Path
) -> None:
    """MEMORY, QUORUM and ARCHIVED are told as they were asked for; an archived write is an object
    of the bucket when it is acknowledged; the other WAL mode is refused by name.
    """
    cluster = Cluster(processes, tmp_path, count=3)
    await cluster.start()
    writer = await cluster.serve("--archive-interval-ms", "60000")
    wal = Path(cluster.url.removeprefix("file://")) / "wal"
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
        # What the opening has left to be archived is no object of a put.
        await client.put(b"key", b"first", durability=Durability.ARCHIVED)
        for level in (Durability.MEMORY, Durability.QUORUM, Durability.ARCHIVED):
            before = len(list(wal.glob("*.sst")))
            commit = await client.put(b"key", level.name.encode(), durability=level)
            assert commit.durability is level
            assert (len(list(wal.glob("*.sst"))) > before) is (level is Durability.ARCHIVED)
    assert await writer.stop() == 0, writer.report()
    other = processes.start_serve(cluster.url, "--wal", "object-store", create=False)
    assert await other.exited() == 2, other.report()
    assert "quorum" in other.stderr()


def patient(address: str) -> Client:
    """A client that waits until the writer tells, and asks once."""
    return Client(address, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT)


async def _latencies(history: History, address: str) -> str:
    """The 99th percentiles of puts in the seconds from now on, none of which may fail."""
    told = []
    async with patient(address) as client:
        for _ in range(SECONDS):
            began_s, took_ms = time.monotonic(), []
            while time.monotonic() < began_s + 1:
                sent_s = time.monotonic()
                attempt = history.begin([b"latency"])
                history.acknowledged(attempt, await send(client, attempt))
                took_ms.append((time.monotonic() - sent_s) * 1_000)
            took_ms.sort()
            told.append(f"{took_ms[len(took_ms) * 99 // 100]:.1f}")
    return " ".join(told) + " ms, second by second"


async def _refused(history: History, address: str) -> str:
    """What a write is told once the writer has noticed."""
    async with asyncio.timeout(PATIENCE_S), patient(address) as client:
        while not (reason := await _try(history, client)):
            continue
    return reason


async def _accepted(history: History, address: str) -> None:
    """Write until a write is acknowledged."""
    began_s = time.monotonic()
    count = len(history.of_fate(Fate.ACKNOWLEDGED))
    async with asyncio.timeout(PATIENCE_S), patient(address) as client:
        while len(history.of_fate(Fate.ACKNOWLEDGED)) == count:
            await _try(history, client)
    sys.stdout.write(f"writes go on after {time.monotonic() - began_s:.2f} s\n")


async def _try(history: History, client: Client) -> str:
    """Write once; why it was refused, empty if it was not."""
    attempt = history.begin([b"tried"])
    try:
        commit = await send(client, attempt)
    except NotApplied as error:
        history.refused(attempt, error.reason)
        return error.reason
    except OutcomeUnknown as error:  # it was on its way
        history.lost_sight(attempt, error.reason or error.code)
    else:
        history.acknowledged(attempt, commit)
    return ""
