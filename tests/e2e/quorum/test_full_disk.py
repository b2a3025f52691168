"""The disks of safekeepers are full: appends are refused, all else goes on, and then they too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from shalekv_client import Client, Durability
from tests.e2e.quorum.probing import until_accepted, until_full
from tests.e2e.quorum.small_disk import SmallDisk, small_disks
from tests.kit.processes.archived import check_archived
from tests.kit.processes.child import Child
from tests.kit.processes.cutting import ALONE
from tests.kit.processes.history import History
from tests.kit.processes.load import TIMEOUT_MS, Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster

MIB = 1 << 20
WRITES = 100
WITHIN_S = 200.0
SMALL_FILES = ("--segment-bytes", "65536", "--disk-free-bytes-min", "0")
KEEP_ALL = ("--archive-look-interval-ms", "3600000")  # nothing is trimmed: it stays full
TRIM_SOON = ("--archive-look-interval-ms", "200", "--archive-unasked-ms", "1000")
NEVER_ENOUGH = ("--disk-free-bytes-min", str(1 << 50))
WRITER = ("--quorum-timeout-ms", "10000", "--vote-timeout-ms", "30000", *ALONE)


async def under_load(history: History, writer: Child, count: int) -> None:
    """So many writes, none of which fails."""
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        load = Load(history, writer.listen, Random(1), clients=6)
        tasks.create_task(load.run())
        assert await load.acknowledged(count), load.reasons()
        load.stop()
    assert not load.ended_by, load.reasons()


@asynccontextmanager
async def on_small_disks(
    processes: Processes, folder: Path, *flags: str
) -> AsyncIterator[tuple[Cluster, list[SmallDisk]]]:
    """Safekeepers that run, each on a file system of its own."""
    cluster = Cluster(processes, folder)
    with small_disks([cluster.data(index) for index in range(3)], 4 * MIB) as disks:
        await cluster.start(*SMALL_FILES, *flags)
        yield cluster, disks
        await cluster.kill(range(3))


async def test_disks_are_full(processes: Processes, tmp_path: Path) -> None:
    """A full disk of one of three is not noticed. With two of them writes are refused as such,
    reads and archiving go on, and a new writer is voted for; it serves as soon as there is room,
    without anybody's help, and nothing acknowledged is lost.
    """
    history = History(1)
    async with on_small_disks(processes, tmp_path, *KEEP_ALL) as (cluster, disks):
        writer = await cluster.serve(*WRITER)
        disks[0].fill()
        await under_load(history, writer, 8 * WRITES)
        disks[1].fill()
        await until_full(history, writer.listen)
        history.check_state(await read_state(writer.listen))
        row = await cluster.status_of(1)
        assert (row["health"], row["problem"]) == ("sound", "the disk is full"), row
        disks[0].clear()
        await until_accepted(history, writer.listen)

        disks[0].fill()
        await until_full(history, writer.listen)
        await writer.kill()
        writer = cluster.start_serve(*WRITER, create=False)
        await writer.line(lambda line: line.get("event") == "elected")
        disks[1].clear()
        await writer.ready()
        await until_accepted(history, writer.listen)
        await check_archived(cluster.files, writer, history)
        assert await writer.stop() == 0, writer.report()


async def test_more_is_written_than_disks_hold(processes: Processes, tmp_path: Path) -> None:
    """Several times as much as disks hold is written: what is archived makes room by itself."""
    history, count, size_bytes = History(2), 200, 64 * 1024
    async with on_small_disks(processes, tmp_path, *TRIM_SOON) as (cluster, _):
        writer = await cluster.serve(*WRITER)
        client = Client(writer.listen, timeout_ms=TIMEOUT_MS)
        async with asyncio.timeout(WITHIN_S), client:
            for number in range(count):
                await client.put(b"large/%d" % (number % 10), bytes(size_bytes))
            await client.put(b"large/0", b"", durability=Durability.ARCHIVED)
        await writer.kill()
        writer = await cluster.serve(*WRITER, create=False)
        found = await read_state(writer.listen)
        assert {key: len(each.value) for key, each in found.items()} == {
            b"large/%d" % number: size_bytes if number else 0 for number in range(10)
        }
        await under_load(history, writer, WRITES)
        assert await writer.stop() == 0, writer.report()


async def test_less_is_free_than_is_to_be_left(processes: Processes, tmp_path: Path) -> None:
    """Safekeepers that are to leave more room than there is take no records and are sound: with a
    majority of them writes are refused, with fewer they go on.
    """
    history, cluster = History(3), Cluster(processes, tmp_path)
    await cluster.start(*SMALL_FILES)
    writer = await cluster.serve(*WRITER)
    await under_load(history, writer, WRITES)
    await cluster.kill([0])
    await cluster.start_node(0, *NEVER_ENOUGH)
    await under_load(history, writer, WRITES)
    await cluster.kill([1])
    await cluster.start_node(1, *NEVER_ENOUGH)
    await until_full(history, writer.listen)
    row = await cluster.status_of(1)
    assert row["health"] == "sound", row
    assert row["problem"], row
    history.check_state(await read_state(writer.listen))
    await cluster.kill([1])
    await cluster.start_node(1)
    await until_accepted(history, writer.listen)
    await check_archived(cluster.files, writer, history)
    assert await writer.stop() == 0, writer.report()
