"""What is killed, stands still or rots, and who takes over: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

import pytest

from tests.e2e.quorum.persistent import Persistent
from tests.e2e.quorum.random_faults import RandomFaults
from tests.kit.processes.archived import check_archived
from tests.kit.processes.cutting import ALONE
from tests.kit.processes.history import Fate, History
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster
from tests.servers.process import free_ports

DURATION_S = 60
DURATION_SOAK_S = 600
RECOVERED_S = 200
# Small files and short times, so that all of it is met: trimming, taking over, giving up.
NODES = (
    *("--segment-bytes", "262144", "--disk-free-bytes-min", "0"),
    *("--archive-look-interval-ms", "300", "--archive-unasked-ms", "1500"),
)
WRITERS = (
    *("--quorum-timeout-ms", "1500", "--vote-timeout-ms", "8000", "--reply-timeout-ms", "1000"),
    *("--safekeeper-connect-timeout-ms", "1000", "--fence-poll-ms", "500"),
    *("--archive-interval-ms", "250", "--archive-takeover-ms", "1500"),
    *ALONE,
)


async def trouble(
    processes: Processes, folder: Path, *, duration_s: float, seed: int
) -> RandomFaults:
    """Faults under load for so long, and the judgement; which they were."""
    history, random = History(seed), Random(seed)
    cluster = Cluster(processes, folder)
    await cluster.start(*NODES)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    faults = RandomFaults(cluster, addresses, WRITERS, random)
    await faults.begin()
    load = Persistent(history, addresses, random)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        await load.more(10, within_s=RECOVERED_S)
        await faults.run(duration_s)
        writer = await faults.settle()
        await load.more(50, within_s=RECOVERED_S)
        load.stop()
    counts = {fate.value: len(history.of_fate(fate)) for fate in Fate}
    sys.stdout.write(f"seed {seed}: {counts}\ntold: {dict(load.told)}\nmade: {dict(faults.made)}\n")
    await check_archived(cluster.files, writer, history)
    assert await writer.stop() == 0, writer.report()
    fsck = await cluster.run("fsck", "--deep")
    assert await fsck.exited() == 0, fsck.report()
    return faults


@pytest.mark.timeout(DURATION_S + 540)
async def test_random_faults_lose_nothing(processes: Processes, tmp_path: Path) -> None:
    """While safekeepers and writers are killed, stand still past their time-outs, come back and
    take over from each other at random, and bits flip and ends are torn off in the log of one that
    is down, nothing that was acknowledged is lost, nothing that was refused is applied, no batch is
    there by half; afterwards writes go on, what was damaged is filled and sound, fsck is clean.
    """
    await trouble(processes, tmp_path, duration_s=DURATION_S, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(DURATION_SOAK_S + 600)
async def test_random_faults_lose_nothing_for_long(processes: Processes, tmp_path: Path) -> None:
    """As above, for ten minutes, in which safekeepers found their logs damaged more than once."""
    faults = await trouble(processes, tmp_path, duration_s=DURATION_SOAK_S, seed=2)
    assert faults.made["logs found damaged"] > 1
