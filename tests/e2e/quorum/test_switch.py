"""The WAL is moved between safekeepers and the object store under load, with readers beside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from shalekv.clock import LoopClock
from shalekv_client import ChangeKind, Client, WatchCommit
from tests.kit.constants import variables
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import LENIENT, POLL_MS, Cluster
from tests.kit.processes.history import Fate, History
from tests.kit.processes.load import TIMEOUT_MS, Load, read_state
from tests.kit.processes.processes import Processes

QUICK = variables({"shalekv.server.safekeeper.node:LOG_RETIRE_INTERVAL_MS": 200})
WRITES = 30  # in each part of a test
PROBES = 3  # puts and deletes of one key, one of each in each part
DEADLINE_S = 200
FENCED = 4
# A child compactor that starts late would take over from the one that a test runs.
NO_COMPACTOR = "--no-with-compactor"


async def _switched_under_load(
    cluster: Cluster, history: History, writer: Child, *flags: str
) -> None:
    """Switch while a writer serves: it ends as fenced, and acknowledges nothing afterwards."""
    load = Load(history, writer.listen, Random(history.seed))
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        assert await load.acknowledged(WRITES), load.reasons()
        switched = await cluster.run("safekeeper", "switch", *flags)
        assert "from manifest" in switched.stdout()
        begun = len(history.attempts)  # earlier ones may have been answered in time
        await load.ended.wait()
    late = [each for each in history.attempts[begun:] if each.fate is Fate.ACKNOWLEDGED]
    assert not late, f"acknowledged after the switch: {late}"
    assert await writer.exited() == FENCED, writer.report()


def _patient(server: Child) -> Client:
    return Client(server.listen, timeout_ms=TIMEOUT_MS)


async def _check_both(history: History, writer: Child, reader: Child) -> None:
    """The writer and a replica that was there all the time show everything."""
    history.check_state(await read_state(writer.listen))
    async with _patient(writer) as client, _patient(reader) as beside:
        commit = await client.put(b"probe", b"of %d" % len(history.attempts))
        assert client.token is not None
        beside.advance(client.token)
        got = await beside.get(b"probe")
        assert got is not None
        assert got.seq == commit.seq
        await client.delete(b"probe")
        beside.advance(client.token)
        assert await beside.get(b"probe") is None


async def _check_upkeep(cluster: Cluster, name: str) -> None:
    """Compactor, collector, snapshot, backup and fsck do as ever."""
    backup = cluster.url.replace("/bucket/db", f"/backup-{name}")
    for argv in (
        ("compactor", "--once", "--wal-trigger-age-ms", "0"),
        ("snapshot", "create", "--name", name, "--forever"),
        ("collector", "--once"),
        ("backup", "create", "--to", backup),
        ("fsck", "--deep"),
    ):
        await cluster.run(*argv)


async def _check_watch(reader: Child) -> None:
    """Check that a watch from the first commit on gets all commits across the modes."""
    seen: list[ChangeKind | None] = []
    async with (
        asyncio.timeout(DEADLINE_S),
        _patient(reader) as client,
        client.watch(prefix=b"probe", from_seq=1) as watch,
    ):
        async for event in watch:
            if isinstance(event, WatchCommit):
                seen += [change.kind for change in event.changes]
            if len(seen) == 2 * PROBES:
                break
    assert seen == [ChangeKind.PUT, ChangeKind.DELETE] * PROBES


async def _hears_from(reader: Child, addresses: Sequence[str]) -> None:
    """Wait until its status names this safekeeper as its source, or none."""
    async with asyncio.timeout(DEADLINE_S), _patient(reader) as client:
        while (status := (await client.status()).reader) is not None:
            if status.tail_address in addresses:
                return
            await LoopClock().sleep_ms(POLL_MS)
    raise AssertionError(f"no reader: {reader.report()}")


async def test_there_and_back_again(processes: Processes, tmp_path: Path) -> None:
    """From the object store to safekeepers and back: nothing acknowledged is lost, the writer
    before is fenced each time, and a replica follows through all of it.
    """
    history = History(15)
    cluster = Cluster(processes, tmp_path, count=3, env=QUICK)
    await cluster.start()
    writer = await processes.serve(cluster.url, NO_COMPACTOR)
    reader = await cluster.read()
    await _check_both(history, writer, reader)
    await _switched_under_load(cluster, history, writer, "--to", "quorum", *cluster.safekeepers)
    other = cluster.start_serve("--wal", "object-store", create=False)
    assert await other.exited() == 2, other.report()
    writer = await cluster.serve(NO_COMPACTOR, *LENIENT, create=False)
    await _check_both(history, writer, reader)
    await _hears_from(reader, cluster.addresses)
    await _check_upkeep(cluster, "first")
    await _switched_under_load(cluster, history, writer, "--to", "object-store")
    await cluster.kill((0, 1, 2))
    writer = await cluster.serve(NO_COMPACTOR, create=False)
    await _check_both(history, writer, reader)
    await _hears_from(reader, [""])
    await _check_watch(reader)
    assert await writer.stop() == 0, writer.report()
    await cluster.run("fsck", "--deep")


async def test_commands_that_read_the_bucket(processes: Processes, tmp_path: Path) -> None:
    """They show what is archived, and name the place of the rest."""
    cluster = await Cluster.started(processes, tmp_path)
    writer = await cluster.serve("--archive-interval-ms", "600000")
    async with _patient(writer) as client:
        for number in range(10):
            await client.put(b"key%d" % number, b"value")
    manifest = await cluster.run("manifest", "--format", "json")
    reported = json.loads(manifest.stdout())
    assert "quorum" in str(reported).lower(), manifest.report()
    assert all(address in str(reported) for address in cluster.addresses)
    wal = await cluster.run("wal")
    assert "safekeepers" in wal.stderr(), wal.report()
    for argv in (("levels",), ("fsck", "--deep")):
        await cluster.run(*argv)
