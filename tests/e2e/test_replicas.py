"""Readers as processes, on a real S3 server: what they tell is the history of their writer."""

from __future__ import annotations

import asyncio
import sys
import time
from uuid import uuid4

import pytest

from tests.e2e.mixed_load import PACE, MixedLoad
from tests.e2e.replica_load import BEHIND_MS, ReplicaLoad
from tests.e2e.test_mixed_load import FLAGS, check_children, goes_on
from tests.kit.processes.processes import Processes
from tests.servers.s3 import S3Server

LOAD_S = 60.0
SOAK_S = 600.0
# Of snapshots: each is renewed within half of it, while all processes edit one manifest.
LIFE_S = 20
RESTLESS = (
    *("--poll-interval-ms", "50", "--poll-interval-min-ms", "5", "--manifest-interval-ms", "300"),
    *("--reader-snapshot-ttl-s", str(LIFE_S), "--block-cache-bytes", "65536"),
)
PROTECTIONS = ("own", "own", "none")


@pytest.mark.timeout(600)
async def test_three_readers_tell_prefixes_of_the_history(
    processes: Processes, s3_server: S3Server
) -> None:
    """While all is compacted and collected all the time, every reply of every reader is a state of
    the log, never older than one before, and shows the commit that was asked for.
    """
    await check_replicas(processes, s3_server, seed=1, duration_s=LOAD_S)


@pytest.mark.soak
@pytest.mark.timeout(1_200)
async def test_the_same_for_ten_minutes(processes: Processes, s3_server: S3Server) -> None:
    """The same for longer."""
    await check_replicas(processes, s3_server, seed=2, duration_s=SOAK_S)


async def check_replicas(
    processes: Processes, s3: S3Server, *, seed: int, duration_s: float
) -> None:
    """Load a writer, read its readers, and judge what they told."""
    bucket = f"replicas-{uuid4().hex}"
    s3.create_bucket(bucket)
    url = f"s3://{bucket}/database"
    env = s3.environment | {"SHALEKV_STORE__ENDPOINT_URL": s3.endpoint}
    writer = await processes.serve(url, *FLAGS, "--snapshot-ttl-s", str(LIFE_S), env=env)
    readers = [
        await processes.read(url, *RESTLESS, "--snapshot", protection, env=env)
        for protection in PROTECTIONS
    ]
    load = MixedLoad(writer.listen, seed)
    addresses = [each.listen for each in readers]
    lazy = {a for a, protection in zip(addresses, PROTECTIONS, strict=True) if protection == "none"}
    replicas = ReplicaLoad(load, addresses, seed, lazy=lazy)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        tasks.create_task(replicas.run())
        began_s = time.monotonic()
        await asyncio.sleep(duration_s)  # the load is what is measured by time
        while goes_on(writer, began_s, duration_s):
            await load.passed(PACE)
        replicas.stop()
        await load.stop()
    load.check()
    for address in addresses:
        assert replicas.done[address]
    for each in readers:
        is_protected = each.listen not in lazy
        await load.check_end(each.listen, behind_ms=BEHIND_MS, is_protected=is_protected)
        bad = [line for line in each.lines() if line.get("level") in ("error", "critical")]
        assert not bad, bad[:5]
        assert await each.stop() == 0, each.report()
    check_children(writer)
    assert await writer.stop() == 0, writer.report()
    sys.stdout.write(f"{len(load.commits)} commits, {dict(replicas.done)}\n")
