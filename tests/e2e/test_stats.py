"""`shalekv admin stats`: what a server and its children have sent to the store, as processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shalekv_client import Client, Stats
from tests.kit.constants import variables
from tests.kit.processes.child_processes import Watched, started
from tests.kit.processes.processes import Processes

ROLES = ("writer", "compactor", "collector")
# So that both have something to do all the time.
BUSY = ("--compactor-idle-poll-ms", "50", "--collect-interval-ms", "100")
SUPERVISOR = "shalekv.cli.process.supervisor"
QUICK = variables({f"{SUPERVISOR}:RESTART_INITIAL_MS": 1, f"{SUPERVISOR}:RESTART_MAX_MS": 100})


def totals(stats: Stats) -> dict[str, int]:
    return {process.role: sum(process.requests.values()) for process in stats.processes}


async def more_than(client: Client, floor: dict[str, int]) -> dict[str, int]:
    """Poll until each process reports more than that."""
    while True:
        found = totals(await client.stats())
        if all(found.get(role, 0) > floor.get(role, 0) for role in ROLES):
            return found
        await client.put(b"k", b"v")  # takes a while, and sends something


async def test_a_restart_of_a_child_loses_nothing(processes: Processes, tmp_path: Path) -> None:
    """The counts of the previous process stay in the sum."""
    server = await processes.serve(f"file://{tmp_path}/db", *BUSY, env=QUICK)
    collector: Watched = await started(server, "collector")
    async with Client(server.listen) as client:
        before = await more_than(client, {})
        os.kill(collector.pid, signal.SIGKILL)
        assert await collector.ended()
        await started(server, "collector", after=collector.pid)
        while (found := totals(await client.stats()))["collector"] <= before["collector"]:
            assert found["collector"] >= before["collector"]
            await client.put(b"k", b"v")
    assert await server.stop() == 0, server.report()
