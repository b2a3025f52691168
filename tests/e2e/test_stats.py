"""`shalekv admin stats`: what a server and its children have sent to the store, as processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from shalekv_client import Client, RequestKind, Stats
from tests.e2e.cli import output
from tests.e2e.test_children import PATIENT, Watched, started
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes

ROLES = ("writer", "compactor", "collector")
# So that both have something to do all the time.
BUSY = ("--compactor-poll-ms", "50", "--collect-interval-ms", "100")
QUICK = ("--child-restart-initial-ms", "1", "--child-restart-max-ms", "100")


def totals(stats: Stats) -> dict[str, int]:
    """Requests of all kinds, by process."""
    return {process.role: sum(process.requests.values()) for process in stats.processes}


async def more_than(client: Client, floor: dict[str, int]) -> dict[str, int]:
    """Ask until each process has told of more than that."""
    while True:
        found = totals(await client.stats())
        if all(found.get(role, 0) > floor.get(role, 0) for role in ROLES):
            return found
        await client.put(b"k", b"v")  # takes a while, and sends something


async def test_every_process_is_told_of(processes: Processes, tmp_path: Path) -> None:
    """Writer, compactor and collector: their counts grow, and the command prints them."""
    server = await processes.serve(f"file://{tmp_path}/db", *BUSY, *PATIENT)
    async with Client(server.listen) as client:
        first = await more_than(client, {})
        before = await client.stats()
        second = await more_than(client, first)
        assert set(second) == set(ROLES)
        by_role = {process.role: process for process in before.processes}
        assert by_role["writer"].requests[RequestKind.WRITE] > 0
        assert by_role["collector"].requests[RequestKind.LIST] > 0
        assert before.url == f"file://{tmp_path}/db"
    rows = await printed(processes, server)
    assert {row["process"] for row in rows} == {*ROLES, "all"}
    for role in ROLES:
        of_role = sum(row["requests"] for row in rows if row["process"] == role)
        assert of_role >= second[role]
    assert {row["usd_per_month"] for row in rows} == {0}  # it is a folder
    assert await server.stop() == 0, server.report()
    assert not any(line.get("level") == "warning" for line in server.lines()), server.report()


async def printed(processes: Processes, server: Child) -> list[dict[str, Any]]:
    """The rows of the command."""
    text = await output(processes, server, "admin", "stats", "--format", "json")
    return [json.loads(line) for line in text.splitlines()]


async def test_a_restart_of_a_child_loses_nothing(processes: Processes, tmp_path: Path) -> None:
    """What the one before it has told stays in the sum."""
    server = await processes.serve(f"file://{tmp_path}/db", *BUSY, *QUICK)
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
