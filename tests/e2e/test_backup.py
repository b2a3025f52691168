"""Backup and restore as commands: from a folder into a bucket and back, while all is at work."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import Client
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.kit.processes.stalling import stalled, start_stalling
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server

# Compaction and collection all the time, of what is only just garbage.
BUSY = (
    *("--wal-trigger-age-ms", "50", "--l0-trigger-count", "2"),
    *("--sst-bytes", "65536", "--compactor-idle-poll-ms", "20", "--collect-interval-ms", "50"),
    *("--collect-age-s", "0", "--wal-retention-s", "0", "--flush-interval-ms", "5"),
)
BACKUPS = 3
DEADLINE_S = 200
Pairs = list[tuple[bytes, bytes]]


class BackedUpDatabase:
    """A database in a folder, backups of it in a bucket, and what is restored of them."""

    def __init__(self, processes: Processes, folder: Path, s3: S3Server) -> None:
        self.database = Cluster(processes, folder, env=s3.environment)
        self.url = self.database.url
        self.bucket = f"s3://{BUCKET}/{uuid4().hex}"
        self.config = folder / "bucket.toml"
        self.config.write_text(f'[store]\nendpoint_url = "{s3.endpoint}"\nread_attempts = 3\n')

    async def run(self, *argv: str) -> Child:
        """Run a command to its end, which must be a good one."""
        return await self.database.processes.run(*argv, env=self.database.env, code=0)

    async def fill(self) -> Pairs:
        """Create the database with SSTs and a log, and no server; return its contents."""
        for first in (0, 100):
            server = await self.database.serve(*ALONE)
            async with Client(server.listen) as client:
                for number in range(first, first + 100):
                    await client.put(key(number), value(number))
            assert await server.stop() == ExitCode.OK
            if not first:
                await self.database.compact()
        return [(key(number), value(number)) for number in range(200)]

    def creating(self) -> tuple[str, ...]:
        there = ("--to", self.bucket, "--to-config", str(self.config))
        return ("backup", "create", "--url", self.url, *there)

    async def back_up(self) -> dict[str, Any]:
        command = await self.run(*self.creating(), "--format", "json")
        return dict(json.loads(command.stdout()))

    def restoring(self, url: str) -> tuple[str, ...]:
        there = ("--from", self.bucket, "--from-config", str(self.config))
        return ("restore", *there, "--url", url)

    async def restore(self, url: str, *flags: str) -> None:
        await self.run(*self.restoring(url), *flags)

    async def there(self, *argv: str) -> Child:
        return await self.run("backup", *argv, "--from", self.bucket, "--config", str(self.config))


async def test_backups_are_made_while_everything_runs(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """Each shows a prefix of the writes, with all that was acknowledged before; all are sound."""
    it = BackedUpDatabase(processes, tmp_path, s3_server)
    server = await it.database.serve(*BUSY)
    made: list[tuple[str, int, int]] = []
    written = 0
    async with asyncio.timeout(DEADLINE_S):
        async with asyncio.TaskGroup() as tasks:
            writes = asyncio.Semaphore(0)

            async def write() -> None:
                nonlocal written
                async with Client(server.listen) as client:
                    while len(made) < BACKUPS:
                        await client.put(key(written), value(written))
                        written += 1
                        writes.release()

            async def back_up() -> None:
                for _ in range(BACKUPS):
                    for _ in range(100):
                        await writes.acquire()
                    acknowledged = written
                    reported = await it.back_up()
                    made.append((reported["backup_id"], acknowledged, written + 1))

            tasks.create_task(write())
            tasks.create_task(back_up())
        listed = await it.there("list", "--format", "json")
        rows = [json.loads(line) for line in listed.stdout().splitlines()]
        # By time, which the store may report in seconds: then the part after the time decides.
        assert [row["backup_id"] for row in rows] == sorted(each[0] for each in made)
        assert "sound" in (await it.there("verify")).stderr()
        backup_id, at_least, at_most = made[1]
        url = f"file://{tmp_path}/restored"
        await it.restore(url, "--backup", backup_id)
        pairs = await scan(processes, url)
        assert at_least <= len(pairs) <= at_most
        assert pairs == sorted((key(n), value(n)) for n in range(len(pairs)))
        async with Client(server.listen) as client:
            found = [(each.key, each.value) async for each in client.scan()]
        assert found == sorted((key(n), value(n)) for n in range(written))
    assert await server.stop() == ExitCode.OK
    await it.run("fsck", "--deep", "--url", it.url)


async def test_a_backup_that_was_stopped_for_too_long_fails(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """Its snapshot has expired, and what it needed is collected: it fails and makes nothing."""
    it = BackedUpDatabase(processes, tmp_path, s3_server)
    database = it.database
    async with asyncio.timeout(DEADLINE_S):
        await it.fill()
        argv, pin = (*it.creating(), "--snapshot-ttl", "5s"), "before create backup_wal/ 1"
        backup = start_stalling(processes, pin, *argv, env=database.env)
        await stalled(backup)
        server = await database.serve(*ALONE)
        async with Client(server.listen) as client:
            await client.put(key(0), b"after the backup began")
        assert await server.stop() == ExitCode.OK
        await database.compact()
        await database.collect_until(lambda line: line.get("dropped_snapshots", 0) > 0)
        await database.collect()
        backup.resume()
        assert await backup.exited() in {ExitCode.DAMAGED, ExitCode.USAGE}, backup.report()
        assert "Traceback" not in backup.stderr()
        assert (await it.there("list", "--format", "raw")).stdout() == ""
        await it.back_up()
        assert "sound" in (await it.there("verify")).stderr()
        await database.check()


async def scan(processes: Processes, url: str) -> Pairs:
    """Return what a server on the restored database shows, after a write to it; check it, too."""
    server = await processes.serve(url, create=False)
    async with Client(server.listen) as client:
        found = [(each.key, each.value) async for each in client.scan()]
        await client.put(b"\xff written", b"to what was restored")
    assert await server.stop() == ExitCode.OK
    await processes.run("fsck", "--deep", "--url", url, code=ExitCode.OK)
    return found


def key(number: int) -> bytes:
    return b"%06d" % number


def value(number: int) -> bytes:
    return b"value of %d " % number * 20
