"""A writer that is asked to stop leaves nothing behind that only safekeepers have, if it can."""

from __future__ import annotations

from pathlib import Path

from shalekv.cli.exit_codes import ExitCode
from shalekv_client import Client
from tests.kit.processes.bucket_troubles import event, troubled_bucket
from tests.kit.processes.child import Child
from tests.kit.processes.cutting import ALONE
from tests.kit.processes.load import TIMEOUT_MS
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster
from tests.kit.processes.wal_contents import read_wal, state_of
from tests.servers.s3 import S3Server

NEVER = ("--archive-interval-ms", "3600000")  # nothing ends an object but that it is full
KEYS = [b"key%d" % number for number in range(20)]
LEFT = event("the end of the log is in the safekeepers alone")


async def write(writer: Child) -> None:
    """A value for each key."""
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
        for key in KEYS:
            await client.put(key, b"value of " + key)


async def test_all_is_archived_when_it_ends(processes: Processes, tmp_path: Path) -> None:
    """Whoever reads the bucket alone finds all that was acknowledged, though nobody waited."""
    cluster = Cluster(processes, tmp_path)
    await cluster.start()
    writer = await cluster.serve(*NEVER, *ALONE)
    await write(writer)
    assert state_of(read_wal(cluster.files)) == {}
    assert await writer.stop() == ExitCode.OK, writer.report()
    found = state_of(read_wal(cluster.files))
    assert {key: each.value for key, each in found.items()} == {
        key: b"value of " + key for key in KEYS
    }
    assert not any(map(LEFT, writer.lines())), writer.report()


async def test_it_ends_without_the_bucket(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """When its time is over it ends, and says so; the next writer has everything."""
    async with troubled_bucket(s3_server, None) as bucket:
        folder = bucket.url.rpartition("/")[0]
        cluster = Cluster(processes, tmp_path, bucket=folder, env=bucket.troubled)
        await cluster.start("--retry-max-ms", "200")
        grace = ("--shutdown-grace-ms", "1000", "--retry-max-ms", "200")
        writer = await cluster.serve(*NEVER, *ALONE, *grace)
        await write(writer)
        await bucket.vanish()
        assert await writer.stop() == ExitCode.OK, writer.report()
        assert any(map(LEFT, writer.lines())), writer.report()
        await bucket.appear()
        successor = await cluster.serve(*ALONE, create=False)
        async with Client(successor.listen, timeout_ms=TIMEOUT_MS) as client:
            for key in KEYS:
                found = await client.get(key)
                assert found is not None
                assert found.value == b"value of " + key
