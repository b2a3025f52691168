"""A safekeeper that was damaged while it was down reports that, is filled again, and counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shalekv.cli.console.exit_codes import ExitCode
from tests.e2e.quorum import damage
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE, Cluster, is_sound
from tests.kit.processes.history import History
from tests.kit.processes.load import WITHIN_S, Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.seeds import random_of, run_seed

WRITES = 50
# Nothing is trimmed, so there is something to be damaged, and something that only they have.
NODES = ("--archive-list-interval-ms", "3600000", "--disk-free-bytes-min", "0")
ANY_WRITER = ("--archive-interval-ms", "1000", "--fence-poll-ms", "200", *ALONE)
WRITER = ("--vote-timeout-ms", "20000", *ANY_WRITER)
HOPELESS = ("--vote-timeout-ms", "1000", *ANY_WRITER)  # there is no majority for it


async def load_and_kill(cluster: Cluster, history: History, writer: Child, index: int) -> None:
    """Write, and kill the writer and one safekeeper in the middle of it."""
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        load = Load(history, writer.listen, random_of(f"damage {index}"), clients=6)
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        await asyncio.gather(cluster.kill([index]), writer.kill())


async def opened_without(cluster: Cluster, history: History, index: int) -> Child:
    """A writer that opens without one of the safekeepers, and shows everything."""
    await cluster.kill([index])
    writer = await cluster.serve(*WRITER, create=False)
    history.check_state(await read_state(writer.listen))
    return writer


async def has_no_vote(cluster: Cluster, other: int) -> None:
    await cluster.kill([other])
    refused = cluster.start_serve(*HOPELESS, create=False)
    assert await refused.exited() == ExitCode.NO_QUORUM, refused.report()
    await cluster.start_node(other)


async def test_records_are_lost(processes: Processes, tmp_path: Path) -> None:
    """A safekeeper that has lost acknowledged records reports that it is damaged, and has no vote:
    with one other no writer opens. A writer that the sound ones elect fills it; from then on it
    counts: with one other a writer opens, and nothing acknowledged is lost.
    """
    history = History(run_seed())
    cluster = await Cluster.started(processes, tmp_path, *NODES)
    writer = await cluster.serve(*WRITER)
    await load_and_kill(cluster, history, writer, 0)
    await cluster.start_node(0)  # from now on all that it has is known to be durable
    await cluster.kill([0])
    random_of("damage").choice(damage.ALL)(cluster.log_folder(0))
    node = await cluster.start_node(0)
    (line,) = damage.damage_events(node)
    assert (line["health"], line["url"]) == ("damaged", cluster.url)
    assert line["problem"]
    assert (await cluster.status_of(0))["health"] == "damaged", cluster.reports()
    await has_no_vote(cluster, 1)
    writer = await cluster.serve(*WRITER, create=False)
    await cluster.until(0, is_sound, within_s=WITHIN_S)
    await load_and_kill(cluster, history, writer, 2)
    await cluster.start_node(2)
    await opened_without(cluster, history, 1)


async def test_a_node_that_has_lost_its_identity_is_no_member(
    processes: Processes, tmp_path: Path
) -> None:
    """A node without its disk, or with unknown promises, is refused: with one other no writer
    opens. Put in its own place by a command it is filled, and makes up a majority with one other.
    """
    history = History(run_seed())
    cluster = await Cluster.started(processes, tmp_path, *NODES)
    writer = await cluster.serve(*WRITER)
    for index, is_wiped in ((1, False), (2, True)):
        await load_and_kill(cluster, history, writer, index)
        if is_wiped:
            cluster.wipe(index)
        else:
            damage.lose_control(cluster.log_folder(index))
        await cluster.start_node(index)
        assert bool(list(cluster.data(index).glob("*.quarantined-1"))) is not is_wiped
        row = await cluster.status_of(index)
        assert (row["health"], bool(row["problem"])) == (None, True), row
        if is_wiped:
            await has_no_vote(cluster, 0)
        writer = await cluster.serve(*WRITER, create=False)
        history.check_state(await read_state(writer.listen))
        address = cluster.addresses[index]
        await cluster.run("safekeeper", "replace", address, address)
        await cluster.until(index, is_sound, within_s=WITHIN_S)
    await writer.kill()
    await opened_without(cluster, history, 0)
