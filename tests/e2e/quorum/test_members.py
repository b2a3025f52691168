"""Members of a quorum are changed under load: nothing is lost, and writes continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shalekv.cli.console.exit_codes import ExitCode
from tests.kit.constants import variables
from tests.kit.processes.child import Child, Line
from tests.kit.processes.cluster import LENIENT, Cluster
from tests.kit.processes.history import History
from tests.kit.processes.load import WITHIN_S, Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.seeds import random_of, run_seed

QUICK = variables({"shalekv.server.safekeeper.node:LOG_RETIRE_INTERVAL_MS": 200})
WRITES = 30  # in each part of a test
WATCHFUL = ("--fence-poll-ms", "200", *LENIENT)  # sees the manifest soon


@asynccontextmanager
async def loaded(history: History, writer: Child) -> AsyncIterator[Load]:
    load = Load(history, writer.listen, random_of("members"), clients=6)
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        yield load
        assert await load.acknowledged(WRITES), load.reasons()
        load.stop()
    assert not load.ended_by, load.reasons()


async def begun(processes: Processes, folder: Path, *, more: int) -> tuple[Cluster, Child]:
    """Create a database on three safekeepers, with more that run, and its writer."""
    cluster = Cluster(processes, folder, count=3, env=QUICK)
    await cluster.start()
    writer = await cluster.serve(*WATCHFUL)
    added = [cluster.add_node() for _ in range(more)]
    await asyncio.gather(*(cluster.start_node(index) for index in added))
    return cluster, writer


async def change(cluster: Cluster, command: str, *indices: int, **flags: str) -> Child:
    addresses = [cluster.addresses[index] for index in indices]
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return await cluster.run("safekeeper", command, *addresses, *words)


def is_member_dropped(line: Line) -> bool:
    """Accept the line by which a node reports that it has dropped a member. It may not know that
    its last records are committed, and so archived: then they are kept.
    """
    return str(line.get("event")).startswith(("member retired", "MEMBER SET ASIDE"))


async def test_three_become_five_and_three_others_under_load(
    processes: Processes, tmp_path: Path
) -> None:
    """Writes continue while members are added, replaced (dead or without their disk) and removed;
    removed members delete their logs; the remaining members have everything.
    """
    history = History(run_seed())
    cluster, writer = await begun(processes, tmp_path, more=3)
    async with loaded(history, writer) as load:
        added = await change(cluster, "add", 3, 4)
        assert all(address in added.stdout() for address in cluster.addresses[:5])
        await cluster.kill([0])
        removed = await change(cluster, "remove", 0, 1)
        assert cluster.addresses[1] not in removed.stdout()
        assert await load.acknowledged(WRITES), load.reasons()
        await cluster.node(1).line(is_member_dropped)
        await cluster.kill([2])
        await change(cluster, "replace", 2, 5)
        assert await load.acknowledged(WRITES), load.reasons()
        await cluster.kill([3])
        cluster.wipe(3)
        await cluster.start_node(3)
        status = await cluster.run("safekeeper", "status")
        assert "does not have this database: its disk was lost" in status.stdout()
        await change(cluster, "replace", 3, 3)
    await cluster.kill([4])  # the others are a majority, the one that was filled among them
    assert await writer.kill()
    writer = await cluster.serve(create=False)
    history.check_state(await read_state(writer.listen))
    # The nodes that were removed are a majority of those that there were at first.
    assert await writer.kill()
    await cluster.kill([3, 5])
    await cluster.start_node(0)
    lonely = cluster.start_serve("--vote-timeout-ms", "1000", create=False)
    assert await lonely.exited() == ExitCode.NO_QUORUM, lonely.report()
    assert cluster.addresses[0] not in lonely.stderr()


async def test_a_change_outlives_its_writer(processes: Processes, tmp_path: Path) -> None:
    """A change whose newcomers do not come up waits, and no other may begin; cancelled, all is as
    before. One that is begun while no writer serves, or whose writer dies, is ended by the next.
    """
    history = History(run_seed())
    cluster, writer = await begun(processes, tmp_path, more=2)
    assert await writer.stop() == 0, writer.report()
    newcomers = cluster.addresses[3:]
    begun_change = await change(cluster, "add", 3, 4, **{"wait-s": "0"})
    assert "is under way" in begun_change.stdout(), begun_change.report()
    second = await cluster.run("safekeeper", "remove", cluster.addresses[0], code=ExitCode.USAGE)
    assert "is under way: let it end, or cancel it first" in second.stderr()
    cancelled = await change(cluster, "cancel")
    assert "the members are" in cancelled.stdout(), cancelled.report()
    assert not any(address in cancelled.stdout() for address in newcomers)
    await change(cluster, "replace", 2, 3, **{"wait-s": "0"})
    writer = await cluster.serve(*LENIENT, create=False)
    await members_are(cluster, 0, 1, 3)
    load = Load(history, writer.listen, random_of("a change"), clients=6)
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        await change(cluster, "replace", 3, 4, **{"wait-s": "0"})
        assert await writer.kill()
    writer = await cluster.serve(create=False)
    await members_are(cluster, 0, 1, 4)
    history.check_state(await read_state(writer.listen))


async def members_are(cluster: Cluster, *indices: int) -> None:
    """Wait until the members are these, and no change is under way."""
    expected = {cluster.addresses[index] for index in indices}
    async with asyncio.timeout(WITHIN_S):
        while set(await cluster.status()) != expected:
            continue
