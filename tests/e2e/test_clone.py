"""`shalekv clone` and the processes of a clone and of its parent, each as it is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.format.names import LEVELS_FOLDER, parse_level_name
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.origins import foreign_ids
from shalekv.store.manifests import StoredManifest
from shalekv_client import Client, Put, RetryPolicy
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server

DEADLINE_S = 200
PLAIN = RetryPolicy(idempotent=False)  # records of idempotency keys are merged much later
POLL_S = 0.05
KEYS = [b"key%04d" % number for number in range(400)]

SMALL = (
    *("--wal-trigger-age-ms", "0", "--l0-trigger-count", "1"),
    *("--sst-bytes", "65536", "--block-bytes", "1024", "--base-level-bytes", "65536"),
)
MERGED = ("--l0-trigger-count", "1", "--block-bytes", "1024")
COMPACT = ("--compactor-idle-poll-ms", "20", *SMALL)
COLLECT = (
    *("--collect-interval-ms", "50", "--collect-age-s", "0", "--wal-retention-s", "0"),
    *("--log-format", "json"),
)


Rows = list[tuple[bytes, bytes, int]]


class Databases:
    """The databases of a test in one bucket, and the commands on them."""

    def __init__(self, processes: Processes, root: str, env: Mapping[str, str]) -> None:
        self.root = root
        self._processes = processes
        self.env = dict(env)

    def __getitem__(self, name: str) -> Cluster:
        return Cluster(self._processes, Path(), bucket=self.root, name=name, env=self.env)

    async def serve(self, name: str) -> Child:
        return await self[name].serve(*ALONE)

    def start(self, command: str, name: str, *flags: str) -> Child:
        return self._processes.start(command, "--url", self[name].url, *flags, env=self.env)

    async def clone(self, name: str, to: str, *flags: str) -> dict[str, Any]:
        flags = ("--to", self[to].url, "--format", "json", *flags)
        reported: dict[str, Any] = json.loads((await self[name].run("clone", *flags)).stdout())
        return reported

    async def fill(self, name: str) -> Rows:
        """A database with levels and a log above them: what is in it."""
        server = await self.serve(name)
        async with plain(server) as client:
            await client.write([Put(key, b"compacted " * 20) for key in KEYS])
            await self[name].compact(*MERGED)
            await client.write([Put(key, b"in the log") for key in KEYS[::3]])
            await client.delete(KEYS[1])
        found = await scanned(server)
        assert await server.stop() == ExitCode.OK
        return found

    async def check(self, name: str) -> None:
        """Every object of it is as it has to be."""
        async with self[name].store() as store:
            found = [each async for each in Fsck(store, is_deep=True).findings()]
        assert not [each for each in found if each.kind.is_damage]

    async def manifest(self, name: str) -> Manifest:
        async with self[name].store() as store:
            return await StoredManifest(store).refresh()

    async def pins(self, name: str) -> list[str]:
        """The names of the snapshots that keep SSTs for clones."""
        snapshots = (await self.manifest(name)).snapshots
        return [each.name for each in snapshots if each.name.startswith("clone ")]

    async def ssts(self, name: str) -> set[bytes]:
        async with self[name].store() as store:
            infos = [info async for info in store.list(LEVELS_FOLDER)]
        return {found for info in infos if (found := parse_level_name(info.name)) is not None}


@pytest.fixture
def databases(processes: Processes, tmp_path: Path) -> Databases:
    """On files."""
    return Databases(processes, f"file://{tmp_path}", {})


def in_bucket(
    processes: Processes, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Databases:
    """In a folder of a bucket, which this process may read, too."""
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    env = server.environment | {"SHALEKV_STORE__ENDPOINT_URL": server.endpoint}
    return Databases(processes, f"s3://{BUCKET}/{tmp_path.name}", env)


def plain(server: Child) -> Client:
    return Client(server.listen, retry=PLAIN, coalesce=False)


async def scanned(server: Child) -> Rows:
    async with plain(server) as client:
        return [(entry.key, entry.value, entry.seq) async for entry in client.scan()]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():  # noqa: ASYNC110 - processes set no event here
            await asyncio.sleep(POLL_S)


async def test_a_clone_where_records_decide(
    processes: Processes,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same where both databases are created in two phases, whose pins are, too."""
    databases = in_bucket(processes, s3_server, tmp_path, monkeypatch)
    databases.env |= {
        "SHALEKV_STORE__CAS": "two_phase",
        "SHALEKV_STORE__RECORDS_URL": f"sqlite://{tmp_path}/records.db",
    }
    await check_life_apart(databases)


async def check_life_apart(databases: Databases) -> None:
    expected = await databases.fill("parent")
    reported = await databases.clone("parent", "clone")
    assert reported["seq"] == 1 + max(seq for _, _, seq in expected)  # of the delete
    shared = foreign_ids((await databases.manifest("clone")).origins)
    assert len(shared) == reported["shared_ssts"] > 0
    assert shared <= await databases.ssts("parent")
    parent, clone = await databases.serve("parent"), await databases.serve("clone")
    assert await scanned(clone) == await scanned(parent) == expected
    async with plain(parent) as first, plain(clone) as second:
        await first.put(KEYS[0], b"of the parent")
        await second.put(KEYS[0], b"of the clone")
        await second.delete(KEYS[2])
        for client, value, is_kept in (
            (first, b"of the parent", True),
            (second, b"of the clone", False),
        ):
            found = await client.get(KEYS[0])
            assert found is not None
            assert found.value == value
            assert (await client.get(KEYS[2]) is not None) is is_kept
    for name in ("parent", "clone"):
        await databases.check(name)
    assert await parent.stop() == await clone.stop() == ExitCode.OK


async def test_the_parent_never_breaks_a_clone(databases: Databases) -> None:
    """While the parent is overwritten, compacted, and collected without mercy, a server and a
    reader of the clone read what it was made of.
    """
    expected = await databases.fill("parent")
    await databases.clone("parent", "clone")
    shared = foreign_ids((await databases.manifest("clone")).origins)
    (pin,) = await databases.pins("parent")
    parent, clone = await databases.serve("parent"), await databases.serve("clone")
    compactor = databases.start("compactor", "parent", *COMPACT)
    collector = databases.start("collector", "parent", *COLLECT)
    async with plain(parent) as client:
        for round_number in range(10):
            await client.write([Put(key, b"%d " % round_number * 50) for key in KEYS])
            assert await scanned(clone) == expected
        await client.delete_range(start=b"key")

    async def is_deleted() -> bool:
        deleted = sum(line.get("deleted_objects", 0) for line in collector.lines())
        held = {info.id for info in (await databases.manifest("parent")).leveled_ssts}
        return deleted > 10 and not held & shared

    await until(is_deleted)
    reader = databases.start("reader", "clone", "--listen", "127.0.0.1:0", "--log-format", "json")
    fresh = await databases.serve("clone")  # neither has cached anything
    await reader.ready()
    assert await scanned(fresh) == await scanned(reader) == expected
    assert shared <= await databases.ssts("parent")
    assert await databases.pins("parent") == [pin]
    assert compactor.running
    await databases.check("clone")
