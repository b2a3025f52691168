"""Forced recovery when a majority is lost for good: what survives is kept, the loss is reported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

from shalekv_client import Client, Durability
from tests.kit.processes.cluster import LENIENT, Cluster
from tests.kit.processes.history import History
from tests.kit.processes.load import TIMEOUT_MS, Load, read_state
from tests.kit.processes.processes import Processes

WRITES = 30
DEADLINE_S = 200
MEANT = "--give-up-acknowledged-writes"
USAGE, FENCED = 2, 4


async def test_a_minority_goes_on(processes: Processes, tmp_path: Path) -> None:
    """The survivor of three has everything that was acknowledged while it was there; the old writer
    with the lost members back is fenced, and safekeepers can be added again.
    """
    history = History(41)
    cluster = await Cluster.started(processes, tmp_path)
    old = await cluster.serve("--fence-poll-ms", "200", *LENIENT)
    load = Load(history, old.listen, Random(41))
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        load.stop()
    refused = await cluster.run("safekeeper", "recover", MEANT, code=USAGE)
    assert "a majority of the safekeepers answers" in refused.stderr()
    await _has_all(cluster)

    old.pause()
    await cluster.kill([0, 1])
    planned = await cluster.run("safekeeper", "recover", "--format", "json")
    reported = json.loads(planned.stdout())
    assert reported["kept_members"] == [cluster.addresses[2]]
    assert sorted(reported["lost_members"]) == sorted(cluster.addresses[:2])
    assert "acknowledged" in reported["given_up"]
    assert "Nothing was changed" in planned.stderr()
    done = await cluster.run("safekeeper", "recover", MEANT)
    assert "lost members never run again" in done.stderr()

    await asyncio.gather(cluster.start_node(0), cluster.start_node(1))
    old.resume()
    assert await old.exited() == FENCED, old.report()
    await cluster.kill([0, 1])
    cluster.wipe(0)
    cluster.wipe(1)
    writer = await cluster.serve("--fence-poll-ms", "200", *LENIENT, create=False)
    history.check_state(await read_state(writer.listen))
    await asyncio.gather(cluster.start_node(0), cluster.start_node(1))
    await cluster.run("safekeeper", "add", *cluster.addresses[:2])
    await cluster.kill([2])
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
        await client.put(b"after", b"all")
    await cluster.run("fsck", "--deep")


async def test_the_archive_alone_goes_on(processes: Processes, tmp_path: Path) -> None:
    """Without any member new ones must be named; all that was archived is there."""
    cluster = await Cluster.started(processes, tmp_path)
    writer = await cluster.serve("--archive-interval-ms", "600000")
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
        await client.put(b"archived", b"value", durability=Durability.ARCHIVED)
        await client.put(b"lost", b"value")
    await writer.kill()
    await cluster.kill(range(3))
    for index in range(3):
        cluster.wipe(index)
    await cluster.start()
    unnamed = await cluster.run("safekeeper", "recover", MEANT, code=USAGE)
    assert "name new safekeepers with --new" in unnamed.stderr()
    new = [flag for address in cluster.addresses for flag in ("--new", address)]
    await cluster.run("safekeeper", "recover", MEANT, *new)
    writer = await cluster.serve(create=False)
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
        assert [entry.key async for entry in client.scan()] == [b"archived"]
    await cluster.run("fsck", "--deep")


async def _has_all(cluster: Cluster) -> None:
    """Wait until the last safekeeper has what the others have."""
    async with asyncio.timeout(DEADLINE_S):
        while len({row["last_lsn"] for row in (await cluster.status()).values()}) > 1:
            continue
