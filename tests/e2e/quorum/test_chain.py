"""A chain of safekeepers under load: whichever of it is killed, no write fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from tests.kit.processes.history import History
from tests.kit.processes.load import Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import LENIENT, Cluster

WRITES = 150  # in each part of the test
PATIENCE_S = 200


async def test_chain_loses_members_under_load(processes: Processes, tmp_path: Path) -> None:
    """Two of five are killed one after the other and come back; nothing is refused, or lost."""
    history, random = History(7), Random(7)
    cluster = Cluster(processes, tmp_path, count=5)
    await cluster.start()
    writer = await cluster.serve("--safekeeper-transport", "chain", "--commit-broadcast", *LENIENT)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        load = Load(history, writer.listen, random)
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        for index in (0, 2):
            await cluster.kill([index])
            assert await load.acknowledged(WRITES), load.reasons()
        for index in (0, 2):
            await cluster.start_node(index)
            assert await load.acknowledged(WRITES), load.reasons()
        load.stop()
    assert not load.ended_by, load.reasons()
    assert await writer.kill()
    writer = await cluster.serve(create=False)
    history.check_state(await read_state(writer.listen))
    assert await writer.stop() == 0, writer.report()
