"""Writes the golden quorum database: ``python -m tests.golden.make_quorum v0_7_quorum``.

The objects of the bucket, and beside them the data folders of its three safekeepers, which hold
records that are not archived. One whose name ends with "switched" had its WAL in the object store
before. Files that exist are never overwritten: what was written once must be
read for ever.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from shalekv_client import Client, Durability
from tests.golden.databases import DATABASES
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes

MEMBERS = 3
DESCRIPTION = "quorum.json"  # not that of a database that can be opened without safekeepers
DATABASE, SAFEKEEPER = "db", "sk{}"
SMALL = ("--segment-bytes", "65536")
UNARCHIVED = ("--archive-interval-ms", "600000", "--no-with-compactor", "--no-with-collector")


async def make(target: Path) -> None:
    entries: list[list[str | int]] = []
    with tempfile.TemporaryDirectory() as scratch, Processes() as processes:
        cluster = Cluster(processes, Path(scratch), count=MEMBERS)
        await cluster.start(*SMALL)
        if target.name.endswith("switched"):
            await _begin_in_object_store(cluster)
        for number in range(2):  # of two epochs
            writer = await cluster.serve(*UNARCHIVED)
            async with Client(writer.listen) as client:
                for each in range(5):
                    await client.put(b"archived%d%d" % (number, each), b"value %d" % each)
                await client.put(b"last%d" % number, b"of it", durability=Durability.ARCHIVED)
                for each in range(5):
                    await client.put(b"in the log%d%d" % (number, each), b"value %d" % each)
                await client.delete(b"archived%d0" % number)
                entries = [
                    [entry.key.decode(), entry.value.decode(), entry.seq]
                    async for entry in client.scan()
                ]
            await writer.kill()
        await cluster.kill(range(MEMBERS))
        _keep(target, cluster, entries)


async def _begin_in_object_store(cluster: Cluster) -> None:
    """Some writes, and the switch."""
    writer = await cluster.processes.serve(cluster.url, *ALONE)
    async with Client(writer.listen) as client:
        for each in range(5):
            await client.put(b"before%d" % each, b"value %d" % each)
    assert await writer.stop() == 0
    await cluster.run("safekeeper", "switch", "--to", "quorum", *cluster.safekeepers)


def _keep(target: Path, cluster: Cluster, entries: list[list[str | int]]) -> None:
    shutil.copytree(cluster.folder, target / DATABASE)
    for number in range(MEMBERS):
        shutil.copytree(cluster.data(number), target / SAFEKEEPER.format(number))
    (target / DESCRIPTION).write_text(json.dumps({"entries": entries}, indent=1) + "\n", "ascii")


if __name__ == "__main__":
    asyncio.run(make(DATABASES / sys.argv[1]))
