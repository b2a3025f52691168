"""Fail-over without a human where safekeepers hold the log: of both, nobody is needed for long."""

from __future__ import annotations

from pathlib import Path

from tests.kit.processes.elected import elected
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster

SERVERS = 2
SHORT = ("--lease-ttl-ms", "1000")


async def test_writers_and_a_safekeeper_are_killed(processes: Processes, tmp_path: Path) -> None:
    """Whoever serves is killed again and again, and another one takes over, with one safekeeper
    less from the second time on. What clients know is what the archive holds in the end.
    """
    cluster = Cluster(processes, tmp_path)
    await cluster.start()
    flags = (*SHORT, *cluster.writer_flags())
    async with elected(
        processes, cluster.files, *["bucket"] * SERVERS, flags=flags, seed=6
    ) as group:
        await group.take_over()
        await cluster.kill([0])
        await group.take_over()
        await cluster.start_node(0)
        await group.take_over()
        group.tell()
