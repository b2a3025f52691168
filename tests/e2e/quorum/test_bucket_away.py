"""The bucket is away: commits go on, up to a bound, and all is archived when it is back."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from shalekv.engine.quorum.links import MemberStatus
from shalekv_client import Client, Durability, OutcomeUnknown, Overloaded
from tests.e2e.quorum.probing import until_accepted, until_full
from tests.kit.processes.bucket_troubles import TroubledBucket, troubled_bucket
from tests.kit.processes.child import Child
from tests.kit.processes.cutting import ALONE
from tests.kit.processes.history import History
from tests.kit.processes.load import ONE_ATTEMPT, TIMEOUT_MS, Load, read_state
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster
from tests.servers.s3 import S3Server

MIB = 1 << 20
WRITES = 200
WITHIN_S = 200.0
UNARCHIVED_BYTES_MAX = 16 * MIB
LARGE_BYTES = MIB // 2
NODES = (
    *("--segment-bytes", "1048576", "--unarchived-bytes-max", str(UNARCHIVED_BYTES_MAX)),
    *("--archive-look-interval-ms", "200", "--retry-max-ms", "200"),
    *("--disk-free-bytes-min", "0"),
)
WRITER = (
    *("--quorum-timeout-ms", "10000", "--retry-max-ms", "200", "--archive-takeover-ms", "1000"),
    *("--held-log-bytes-max", str(8 * UNARCHIVED_BYTES_MAX)),
    *ALONE,
)


class Stopwatch:
    """Tells how long each step took."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, step: str) -> None:
        took_s = time.monotonic() - self._began_s
        sys.stdout.write(f"{step}: {took_s:.2f} s\n")
        self._began_s = time.monotonic()


def cluster_on(bucket: TroubledBucket, processes: Processes, folder: Path) -> Cluster:
    """Safekeepers that archive to a bucket on S3."""
    return Cluster(processes, folder, bucket=bucket.url.rpartition("/")[0], env=bucket.troubled)


def is_trimmed(held: MemberStatus) -> bool:
    """Whether what is archived has gone from the disk."""
    return held.log_bytes < UNARCHIVED_BYTES_MAX // 4


async def test_commits_go_on_while_the_bucket_is_away(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """While the object store is away no write fails; when it is back all of it is archived and goes
    from the disks, and fsck is clean.
    """
    history = History(1)
    async with troubled_bucket(s3_server, None) as bucket:
        cluster = cluster_on(bucket, processes, tmp_path)
        await cluster.start(*NODES)
        writer = await cluster.serve(*WRITER)
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
            load = Load(history, writer.listen, Random(1), clients=6)
            tasks.create_task(load.run())
            assert await load.acknowledged(WRITES), load.reasons()
            told = Stopwatch()
            await bucket.vanish()
            told("the bucket went away")
            assert await load.acknowledged(3 * WRITES), load.reasons()
            told(f"{3 * WRITES} writes without it")
            await bucket.appear()
            assert await load.acknowledged(WRITES), load.reasons()
            told(f"{WRITES} writes with it")
            load.stop()
        assert not load.ended_by, load.reasons()
        await all_is_archived(cluster, writer, history)
        assert await writer.stop() == 0, writer.report()
        fsck = await cluster.run("fsck", "--deep")
        assert await fsck.exited() == 0, fsck.report()


async def test_what_is_not_archived_has_a_bound(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """When more is not archived than safekeepers are to hold, writes are refused and reads go on;
    when the store is back writes go on by themselves, and nothing acknowledged is lost.
    """
    history, acknowledged = History(2), 0
    async with troubled_bucket(s3_server, None) as bucket:
        cluster = cluster_on(bucket, processes, tmp_path)
        await cluster.start(*NODES)
        writer = await cluster.serve(*WRITER)
        await bucket.vanish()
        async with Client(writer.listen, retry=ONE_ATTEMPT, timeout_ms=20_000) as client:
            with suppress(Overloaded, OutcomeUnknown):  # unknown: the first that found no room
                while acknowledged * LARGE_BYTES < 4 * UNARCHIVED_BYTES_MAX:
                    await client.put(b"large/%d" % acknowledged, bytes(LARGE_BYTES))
                    acknowledged += 1
        assert UNARCHIVED_BYTES_MAX // 2 < acknowledged * LARGE_BYTES < 4 * UNARCHIVED_BYTES_MAX
        assert acknowledged > UNARCHIVED_BYTES_MAX // LARGE_BYTES // 2
        await until_full(history, writer.listen)
        await everything_large_is_there(writer.listen, acknowledged)
        await bucket.appear()
        await until_accepted(history, writer.listen)
        await everything_large_is_there(writer.listen, acknowledged)
        await writer.kill()
        writer = await cluster.serve(*WRITER, create=False)
        await everything_large_is_there(writer.listen, acknowledged)
        async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
            for number in range(acknowledged + 1):  # that with an unknown outcome, too
                await client.delete(b"large/%d" % number)
        await all_is_archived(cluster, writer, history)
        assert await writer.stop() == 0, writer.report()


async def everything_large_is_there(address: str, count: int) -> None:
    """The values that were acknowledged can be read."""
    async with Client(address, timeout_ms=TIMEOUT_MS) as client:
        for number in range(count):
            found = await client.get(b"large/%d" % number)
            assert found is not None
            assert len(found.value) == LARGE_BYTES


async def all_is_archived(cluster: Cluster, writer: Child, history: History) -> None:
    """What was written reaches the bucket and goes from the disks; clients know the same."""
    told = Stopwatch()
    attempt = history.begin([b"last"])
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
        value = attempt.changes[b"last"]
        assert value is not None
        commit = await client.put(b"last", value, durability=Durability.ARCHIVED)
    history.acknowledged(attempt, commit)
    told("all is archived")
    for index in range(3):
        await cluster.until(index, is_trimmed, within_s=WITHIN_S)
    told("trimmed")
    state = await read_state(writer.listen)
    history.check_state(state)
