"""Members of a quorum are changed under load: nothing is lost, and writes go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from tests.kit.processes.child import Child, Line
from tests.kit.processes.history import History
from tests.kit.processes.load import Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import LENIENT, Cluster

WRITES = 60  # in each part of a test
PATIENCE_S = 200
WATCHFUL = ("--fence-poll-ms", "200", *LENIENT)  # sees the manifest soon
FORGETFUL = ("--retire-interval-ms", "200")


@asynccontextmanager
async def loaded(history: History, writer: Child) -> AsyncIterator[Load]:
    """Load on a writer, which meets no error."""
    load = Load(history, writer.listen, Random(history.seed))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        yield load
        assert await load.acknowledged(WRITES), load.reasons()
        load.stop()
    assert not load.ended_by, load.reasons()


async def change(cluster: Cluster, command: str, *indices: int) -> Child:
    """A change of members, to its end."""
    addresses = [cluster.addresses[index] for index in indices]
    child = await cluster.run("safekeeper", command, *addresses)
    assert await child.exited() == 0, child.report()
    return child


def is_let_go(line: Line) -> bool:
    """Whether a node says that it has a member no more. It may not know of its last records that
    they are committed, and so archived: then they are kept.
    """
    return str(line.get("event")).startswith(("member retired", "MEMBER SET ASIDE"))


async def test_three_become_five_and_three_others_under_load(
    processes: Processes, tmp_path: Path
) -> None:
    """Writes go on while members are added, replaced and removed; those who were removed delete
    their logs; the members that are left have everything without them.
    """
    history = History(35)
    cluster = Cluster(processes, tmp_path, count=3)
    writer_flags = cluster.writer_flags()
    await cluster.start(*FORGETFUL)
    writer = await processes.serve(cluster.url, *writer_flags, *WATCHFUL)
    for _ in range(2):
        await cluster.start_node(cluster.add_node())
    async with loaded(history, writer) as load:
        added = await change(cluster, "add", 3, 4)
        assert all(address in added.stdout() for address in cluster.addresses)
        assert await load.acknowledged(WRITES), load.reasons()
        await cluster.kill([0])
        removed = await change(cluster, "remove", 0, 1)
        assert cluster.addresses[1] not in removed.stdout()
        assert await load.acknowledged(WRITES), load.reasons()
        await asyncio.to_thread(cluster.node(1).wait_for_line, is_let_go)
    await cluster.kill([1])
    assert await writer.kill()
    writer = await cluster.serve(create=False)
    history.check_state(await read_state(writer.listen))
    # The nodes that were removed are a majority of those that there were at first.
    assert await writer.kill()
    await cluster.kill([3, 4])
    await asyncio.gather(cluster.start_node(0), cluster.start_node(1))
    lonely = processes.start_serve(cluster.url, "--vote-timeout-ms", "1500", create=False)
    assert await lonely.exited() == 13, lonely.report()
    assert cluster.addresses[0] not in lonely.stderr()
    await asyncio.gather(cluster.start_node(3), cluster.start_node(4))
    writer = await cluster.serve(create=False)
    history.check_state(await read_state(writer.listen))


async def test_nodes_are_replaced_under_load(processes: Processes, tmp_path: Path) -> None:
    """One that is alive, one that is dead, and one that has lost its disk, at its own address."""
    history = History(36)
    cluster = Cluster(processes, tmp_path, count=3)
    writer_flags = cluster.writer_flags()
    await cluster.start(*FORGETFUL)
    writer = await processes.serve(cluster.url, *writer_flags, *WATCHFUL)
    for _ in range(2):
        await cluster.start_node(cluster.add_node())
    async with loaded(history, writer) as load:
        await change(cluster, "replace", 0, 3)
        assert await load.acknowledged(WRITES), load.reasons()
        await cluster.kill([1])
        await change(cluster, "replace", 1, 4)
        assert await load.acknowledged(WRITES), load.reasons()
        await cluster.kill([2])
        cluster.wipe(2)
        await cluster.start_node(2)
        refused = await cluster.run("safekeeper", "status")
        assert "does not have this database: its disk was lost" in refused.stdout()
        await change(cluster, "replace", 2, 2)
    await cluster.kill([3])  # the others are a majority, the one that was filled among them
    assert await writer.kill()
    writer = await cluster.serve(create=False)
    history.check_state(await read_state(writer.listen))


async def test_a_change_outlives_its_writer(processes: Processes, tmp_path: Path) -> None:
    """A change whose newcomers do not come up waits, and no other may begin; cancelled, all is as
    before. One that is begun while no writer serves, or whose writer dies, is ended by the next.
    """
    history = History(37)
    cluster = Cluster(processes, tmp_path, count=3)
    writer_flags = cluster.writer_flags()
    await cluster.start()
    writer = await processes.serve(cluster.url, *writer_flags, *WATCHFUL)
    for _ in range(2):
        await cluster.start_node(cluster.add_node())
    async with loaded(history, writer):
        pass
    assert await writer.stop() == 0, writer.report()

    newcomers = cluster.addresses[3:]
    begun = await cluster.run("safekeeper", "add", *newcomers, "--wait-s", "0")
    assert "is under way" in begun.stdout(), begun.report()
    await cluster.kill([3, 4])
    second = await cluster.run("safekeeper", "remove", cluster.addresses[0])
    assert await second.exited() == 2
    assert "is under way: let it end, or cancel it first" in second.stderr()
    cancelled = await cluster.run("safekeeper", "cancel")
    assert "the members are" in cancelled.stdout(), cancelled.report()
    assert not any(address in cancelled.stdout() for address in newcomers)

    await cluster.start_node(3)
    begun = await cluster.run("safekeeper", "replace", *cluster.addresses[2:4], "--wait-s", "0")
    assert await begun.exited() == 0, begun.report()
    writer = await cluster.serve(*LENIENT, create=False)
    await members_are(cluster, 0, 1, 3)
    await cluster.start_node(4)
    load = Load(history, writer.listen, Random(38))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        begun = await cluster.run("safekeeper", "replace", *_pair(cluster, 3, 4), "--wait-s", "0")
        assert await begun.exited() == 0, begun.report()
        assert await writer.kill()
    writer = await cluster.serve(create=False)
    await members_are(cluster, 0, 1, 4)
    history.check_state(await read_state(writer.listen))


def _pair(cluster: Cluster, old: int, new: int) -> tuple[str, str]:
    return cluster.addresses[old], cluster.addresses[new]


async def members_are(cluster: Cluster, *indices: int) -> None:
    """Wait until the members are these, and no change is under way."""
    expected = sorted(cluster.addresses[index] for index in indices)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await cluster.run("safekeeper", "status", "--format", "json")
            found = [json.loads(line) for line in status.stdout().splitlines()]
            if sorted(each["address"] for each in found) == expected:
                return
