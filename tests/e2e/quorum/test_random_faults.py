"""Safekeepers that are killed, paused or damaged, and take-overs: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

import pytest

from tests.e2e.quorum.random_faults import RandomFaults
from tests.kit.constants import variables
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.history import History
from tests.kit.processes.load import Persistent, check_archived
from tests.kit.processes.processes import Processes
from tests.kit.seeds import random_of, run_seed
from tests.servers.process import free_ports

DURATION_S, DURATION_SOAK_S = 12, 600
# Small files and short times, so that all of it is met: trimming, taking over, giving up.
NODES = (
    *("--segment-bytes", "262144", "--disk-free-bytes-min", "0"),
    *("--archive-list-interval-ms", "300", "--archive-unappointed-ms", "1500"),
)
WRITERS = (
    *("--quorum-timeout-ms", "1500", "--vote-timeout-ms", "8000"),
    *("--fence-poll-ms", "500"),
    *("--archive-interval-ms", "250"),
    *ALONE,
)

QUICK = variables(
    {
        "shalekv.write.quorum.links:CONNECT_TIMEOUT_MS": 1_000,
        "shalekv.write.quorum.peer:REPLY_TIMEOUT_MS": 1_000,
        "shalekv.write.quorum.log:ARCHIVE_TAKEOVER_MS": 1_500,
    }
)


@pytest.mark.timeout(DURATION_SOAK_S + 600)
@pytest.mark.parametrize(
    "duration_s", [DURATION_S, pytest.param(DURATION_SOAK_S, marks=pytest.mark.soak)]
)
async def test_random_faults_lose_nothing(
    processes: Processes, tmp_path: Path, duration_s: int
) -> None:
    """While safekeepers and writers are killed, paused past their timeouts, restarted, and take
    over from each other at random, and bits flip and ends are torn off in the log of one that is
    down, no acknowledged write is lost, no refused write is applied, and no batch is partial;
    afterwards writes continue, damaged logs are filled and sound, and fsck is clean.
    """
    random = random_of(f"quorum faults for {duration_s} s")
    cluster = Cluster(processes, tmp_path, count=3, env=QUICK)
    await cluster.start(*NODES)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    faults = RandomFaults(cluster, addresses, WRITERS, random)
    await faults.begin()
    load = Persistent(History(run_seed()), addresses, Random(random.getrandbits(64)))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        await load.more(10)
        await faults.run(duration_s)
        writer = await faults.settle()
        await load.more(30)
        load.over.set()
    sys.stdout.write(f"reasons: {dict(load.reasons)}\nmade: {dict(faults.made)}\n")
    await check_archived(cluster.folder, writer, load.history)
    assert await writer.stop() == 0, writer.report()
    await cluster.run("fsck", "--deep")
    if duration_s == DURATION_SOAK_S:
        assert faults.made["logs found damaged"] > 1
