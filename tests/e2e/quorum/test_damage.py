"""A safekeeper that was damaged while it was down says so, is filled again, and counts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from shalekv.cli.exit_codes import ExitCode
from tests.e2e.quorum import damage
from tests.kit.processes.child import Child
from tests.kit.processes.cutting import ALONE
from tests.kit.processes.history import History
from tests.kit.processes.load import Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster, is_sound

WRITES = 100
WITHIN_S = 200.0
# Nothing is trimmed, so there is something to be damaged, and something that only they have.
NODES = ("--archive-look-interval-ms", "3600000", "--disk-free-bytes-min", "0")
ANY_WRITER = ("--archive-interval-ms", "1000", "--fence-poll-ms", "200", *ALONE)
WRITER = ("--vote-timeout-ms", "20000", *ANY_WRITER)
HOPELESS = ("--vote-timeout-ms", "2000", *ANY_WRITER)  # there is no majority for it
Damage = Callable[[Path], None]


async def load_and_kill(cluster: Cluster, history: History, writer: Child, index: int) -> None:
    """Write, and kill the writer and one safekeeper in the middle of it."""
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        load = Load(history, writer.listen, Random(len(history.attempts)), clients=6)
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        await asyncio.gather(cluster.kill([index]), writer.kill())


async def check(history: History, writer: Child) -> None:
    """Everything that was acknowledged is there."""
    history.check_state(await read_state(writer.listen))


@pytest.mark.parametrize(
    "damages",
    [
        (damage.flip_in_records, damage.tear_off, damage.lose_segment),
        (damage.cut_file, damage.flip_in_head, damage.lose_synced),
    ],
    ids=["records", "files"],
)
async def test_records_are_lost(
    processes: Processes, tmp_path: Path, damages: tuple[Damage, ...]
) -> None:
    """A safekeeper that has lost records that it had acknowledged says that it is damaged, and has
    no vote: with one other no writer opens. A writer that the sound ones elect fills it; from then
    on it counts: with one other a writer opens, and nothing acknowledged is lost.
    """
    history, cluster = History(len(damages)), Cluster(processes, tmp_path)
    await cluster.start(*NODES)
    writer = await cluster.serve(*WRITER)
    for index, harm in enumerate(damages):
        await load_and_kill(cluster, history, writer, index)
        harm(cluster.log_folder(index))
        node = await cluster.start_node(index)
        (told,) = damage.told(node)
        assert (told["health"], told["url"]) == ("damaged", cluster.url)
        assert told["problem"]
        row = await cluster.status_of(index)
        assert row["health"] == "damaged", f"{harm.__name__}: {row}\n{cluster.reports()}"

        other = (index + 1) % 3
        if index == 0:
            await cluster.kill([other])
            refused = cluster.start_serve(*HOPELESS, create=False)
            assert await refused.exited() == ExitCode.NO_QUORUM, refused.report()
            await cluster.start_node(other)

        began_s = time.monotonic()
        writer = await cluster.serve(*WRITER, create=False)
        await check(history, writer)
        await cluster.until(index, is_sound, within_s=WITHIN_S)
        took_s = time.monotonic() - began_s
        sys.stdout.write(f"{harm.__name__}: filled and sound after {took_s:.2f} s\n")

    await load_and_kill(cluster, history, writer, 0)  # the others make up a majority
    writer = await cluster.serve(*WRITER, create=False)
    await check(history, writer)


async def test_what_was_not_durable_is_no_loss(processes: Processes, tmp_path: Path) -> None:
    """Garbage behind the last record is cut, and of each small file one slot suffices: the
    safekeeper is sound when it starts, and makes up a majority with one other.
    """
    history, cluster = History(4), Cluster(processes, tmp_path)
    await cluster.start(*NODES)
    writer = await cluster.serve(*WRITER)
    await load_and_kill(cluster, history, writer, 0)
    for harm in (damage.append_garbage, damage.flip_a_synced_slot, damage.flip_a_control_slot):
        harm(cluster.log_folder(0))
    await cluster.start_node(0)
    assert (row := await cluster.status_of(0))["health"] == "sound", row
    await cluster.kill([1])
    writer = await cluster.serve(*WRITER, create=False)
    await check(history, writer)
    assert await writer.stop() == 0, writer.report()


async def test_a_node_that_has_lost_its_identity_is_no_member(
    processes: Processes, tmp_path: Path
) -> None:
    """A node without its disk, or of which nobody knows what it has promised, is refused: with one
    other no writer opens. Put in its own place by a command it is filled, and makes up a majority
    with one other.
    """
    history, cluster = History(5), Cluster(processes, tmp_path)
    await cluster.start(*NODES)
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
            await cluster.kill([0])
            refused = cluster.start_serve(*HOPELESS, create=False)
            assert await refused.exited() == ExitCode.NO_QUORUM, refused.report()
            await cluster.start_node(0)
        writer = await cluster.serve(*WRITER, create=False)
        await check(history, writer)
        await replace_by_itself(cluster, index)
    await load_and_kill(cluster, history, writer, 0)  # the others make up a majority
    writer = await cluster.serve(*WRITER, create=False)
    await check(history, writer)
    assert await writer.stop() == 0, writer.report()


async def replace_by_itself(cluster: Cluster, index: int) -> None:
    """Put a node in its own place, and wait until it votes."""
    began_s = time.monotonic()
    address = cluster.addresses[index]
    replaced = await cluster.run("safekeeper", "replace", address, address)
    assert await replaced.exited() == 0, replaced.report()
    await cluster.until(index, is_sound, within_s=WITHIN_S)
    sys.stdout.write(f"replaced after {time.monotonic() - began_s:.2f} s\n")
