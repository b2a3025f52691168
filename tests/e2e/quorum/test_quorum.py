"""Safekeepers under load that are killed, cut off, slow, full, or without their bucket.

The loss of a minority has no effect; without a majority writes are refused, and continue by
themselves later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import Client, Durability, OutcomeUnknown, Overloaded
from tests.kit.constants import variables
from tests.kit.processes.bucket_troubles import troubled_bucket
from tests.kit.processes.child import Child, event, fenced_end
from tests.kit.processes.cluster import ALONE, LENIENT, Cluster
from tests.kit.processes.history import History
from tests.kit.processes.load import (
    LOG_FULL,
    NO_QUORUM,
    ONE_ATTEMPT,
    TIMEOUT_MS,
    WITHIN_S,
    Load,
    check_archived,
    read_state,
    until_accepted,
    until_refused,
)
from tests.kit.processes.processes import Processes
from tests.kit.processes.uplink import uplink
from tests.kit.processes.wal_contents import read_wal, state_of
from tests.kit.seeds import random_of, run_seed
from tests.servers.s3 import S3Server

QUICK_REPLIES = variables({"shalekv.write.quorum.peer:REPLY_TIMEOUT_MS": 500})
QUICK = variables({"shalekv.store.retry:RETRY_MAX_MS": 200})
WRITES = 40  # in each part of a test
CHAIN = ("--safekeeper-transport", "chain", "--commit-broadcast")
# Longer than a busy machine holds anybody up: while a majority is there no write may fail.
TELLING = ("--quorum-timeout-ms", "10000")
# Writes wait for a majority as long as it takes: what ends them is the fence.
PATIENT = ("--quorum-timeout-ms", "3600000", *ALONE)
NO_POLL = ("--fence-poll-ms", "3600000", "--open-timeout-ms", "3600000")
NEVER_ARCHIVES = ("--archive-interval-ms", "3600000")  # nothing ends an object but that it is full
NEVER_ENOUGH = ("--disk-free-bytes-min", str(1 << 50))
BOTH = {"requests": True, "replies": True}
NO_REQUESTS = {"requests": True, "replies": False}
NO_REPLIES = {"requests": False, "replies": True}
LEFT = event("the end of the log is in the safekeepers alone")


class Loads:
    """Loads on the writers of one cluster, whose clients have one history."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.history = History(run_seed())
        self._random = random_of("loads on a cluster")
        self._tasks = tasks

    async def begin(self, writer: Child, *, memory_share: float = 0) -> Load:
        """Put load on a writer, which acknowledges some of it."""
        load = Load(self.history, writer.listen, self._random, clients=6, memory_share=memory_share)
        self._tasks.create_task(load.run(), name=f"load on {writer.listen}")
        await more(load)
        return load


@asynccontextmanager
async def loads() -> AsyncIterator[Loads]:
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        yield Loads(tasks)


async def more(load: Load, count: int = WRITES) -> None:
    assert await load.acknowledged(count), load.reasons()


async def rest(load: Load) -> None:
    """End a load; all of it was answered well."""
    load.stop()
    await load.ended.wait()
    assert not load.ended_by, load.reasons()


@pytest.mark.parametrize("transport", [(), CHAIN], ids=["direct", "chain"])
async def test_two_of_five_are_lost_under_load(
    processes: Processes, tmp_path: Path, transport: tuple[str, ...]
) -> None:
    """No write fails while two of five are killed and one comes back; with a majority lost writes
    are refused as unavailable and reads continue; with one back writes continue by themselves. When
    all are killed at once with the writer, they come back with everything.
    """
    cluster = await Cluster.started(processes, tmp_path, count=5)
    writer = await cluster.serve(*TELLING, *transport)
    async with loads() as running:
        load = await running.begin(writer, memory_share=0.05)
        for index in (0, 3):
            await cluster.kill([index])
            await more(load)
        await cluster.start_node(3)
        await more(load)
        await rest(load)
        await cluster.kill([3, 4])
        await until_refused(running.history, writer.listen, NO_QUORUM)
        running.history.check_state(await read_state(writer.listen))
        await cluster.start_node(0)
        await until_accepted(running.history, writer.listen)
        load = await running.begin(writer)
        await asyncio.gather(cluster.kill((0, 1, 2)), writer.kill())
    await asyncio.gather(*(cluster.start_node(index) for index in range(5)))
    writer = await cluster.serve(create=False)
    running.history.check_state(await read_state(writer.listen))


async def test_replies_say_which_durability_was_reached(
    processes: Processes, tmp_path: Path
) -> None:
    """Replies report MEMORY, QUORUM or ARCHIVED as requested; an archived write is an object of the
    bucket when it is acknowledged, and all are when the writer has stopped. The other WAL mode is
    refused by name.
    """
    cluster = await Cluster.started(processes, tmp_path)
    writer = await cluster.serve(*NEVER_ARCHIVES, *ALONE)
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
        # Records that the opening left to be archived are not part of a put's object.
        await client.put(b"key", b"first", durability=Durability.ARCHIVED)
        for level in (Durability.MEMORY, Durability.QUORUM, Durability.ARCHIVED, Durability.QUORUM):
            before = state_of(read_wal(cluster.folder))
            commit = await client.put(b"key", level.name.encode(), durability=level)
            assert commit.durability is level
            changed = state_of(read_wal(cluster.folder)) != before
            assert changed is (level is Durability.ARCHIVED)
    assert await writer.stop() == 0, writer.report()
    assert state_of(read_wal(cluster.folder))[b"key"].value == b"QUORUM"
    assert not any(map(LEFT, writer.lines())), writer.report()
    other = cluster.start_serve("--wal", "object-store", create=False)
    assert await other.exited() == ExitCode.USAGE, other.report()
    assert "quorum" in other.stderr()


async def test_a_writer_that_is_cut_off_acknowledges_nothing_more(
    processes: Processes, tmp_path: Path
) -> None:
    """An old writer is cut off from a majority while a new one takes over: it acknowledges nothing
    after the fence, and its pending writes end as unknown. It learns of it from the manifest while
    it is cut off, and no packet that arrives later changes anything.
    """
    cluster = await Cluster.started(processes, tmp_path)
    async with uplink() as way, loads() as running:
        old = await cluster.serve(*PATIENT, "--fence-poll-ms", "100", env=way.env)
        assert way.connection_count >= 3, "it does not use its way"
        load = await running.begin(old)
        way.cut(cluster.addresses[:2], **BOTH)
        new = await cluster.serve(*ALONE, *LENIENT, create=False)
        acknowledged = load.acknowledged_count
        others = await running.begin(new)
        await rest(others)
        await fenced_end(old)
        await load.ended.wait()
        assert set(load.reasons()) == {"OUTCOME_UNKNOWN"}, load.reasons()
        assert load.acknowledged_count == acknowledged, "acknowledged after the fence"
        way.heal()
        await check_archived(cluster.folder, new, running.history)


async def test_a_writer_that_comes_back_learns_of_its_successor(
    processes: Processes, tmp_path: Path
) -> None:
    """The same with a writer that never polls the manifest and gets no replies: when all that was
    sent arrives late, the members tell it. Until then it may acknowledge what a majority had on
    disk before they voted for the other one, which thus has it.
    """
    cluster = await Cluster.started(processes, tmp_path)
    async with uplink() as way, loads() as running:
        old = await cluster.serve(*PATIENT, *NO_POLL, env=way.env)
        load = await running.begin(old)
        way.cut(cluster.addresses, **NO_REPLIES)
        new = await cluster.serve(*ALONE, *LENIENT, create=False)
        others = await running.begin(new)
        assert old.running, old.report()
        way.heal()
        await fenced_end(old)
        await load.ended.wait()
        await rest(others)
        await check_archived(cluster.folder, new, running.history)


async def test_a_safekeeper_is_cut_off_or_slow_and_comes_back(
    processes: Processes, tmp_path: Path
) -> None:
    """No write fails while one of three is cut off, in both directions or in one, or slow; when it
    is back it gets what it lacks, and makes up the majority without the one that is killed then.
    """
    cluster = await Cluster.started(processes, tmp_path)
    async with uplink() as way, loads() as running:
        writer = await cluster.serve(*ALONE, *LENIENT, env=QUICK_REPLIES | dict(way.env))
        load = await running.begin(writer)
        for cut in (BOTH, NO_REQUESTS, NO_REPLIES):
            way.cut([cluster.addresses[0]], **cut)
            await more(load)
            way.heal()
        way.slow([cluster.addresses[0]], 50)
        await more(load)
        await cluster.kill([1])
        await more(load, WRITES // 4)
        way.heal()
        await rest(load)
        await check_archived(cluster.folder, writer, running.history)


async def test_commits_go_on_while_the_bucket_is_away(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """While the object store is unreachable no write fails; afterwards all of it is archived. A
    writer that is stopped meanwhile ends when its time is over, and reports what is left; the next
    writer has everything.
    """
    async with troubled_bucket(s3_server) as bucket, loads() as running:
        cluster = Cluster(processes, tmp_path, count=3, bucket=bucket.url, env=bucket.env | QUICK)
        await cluster.start()
        grace = ("--shutdown-grace-ms", "500")
        writer = await cluster.serve(*ALONE, *LENIENT, *grace)
        load = await running.begin(writer)
        await bucket.vanish()
        await more(load, 2 * WRITES)
        await rest(load)
        assert await writer.stop() == ExitCode.OK, writer.report()
        assert any(map(LEFT, writer.lines())), writer.report()
        await bucket.appear()
        writer = await cluster.serve(*ALONE, *LENIENT, create=False)
        await rest(await running.begin(writer))
        async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
            await client.put(b"no key of the history", b"", durability=Durability.ARCHIVED)
            await client.delete(b"no key of the history")
        running.history.check_state(await read_state(writer.listen))
        assert await writer.stop() == ExitCode.OK, writer.report()
        await cluster.run("fsck", "--deep")


@pytest.mark.soak
async def test_what_is_not_archived_has_a_bound(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """When more is unarchived than safekeepers may hold, writes are refused and reads continue;
    when the store is back writes continue by themselves, and nothing acknowledged is lost.
    """
    history, value, count = History(run_seed()), bytes(1 << 19), 0
    async with troubled_bucket(s3_server) as bucket:
        cluster = Cluster(processes, tmp_path, count=3, bucket=bucket.url, env=bucket.env)
        await cluster.start("--unarchived-bytes-max", str(16 << 20), "--disk-free-bytes-min", "0")
        writer = await cluster.serve(*TELLING, *ALONE)
        await bucket.vanish()
        async with Client(writer.listen, timeout_ms=20_000, retry=ONE_ATTEMPT) as client:
            # unknown: the first for which there was no space
            with suppress(Overloaded, OutcomeUnknown):
                for count in range(128):
                    await client.put(b"large/%d" % count, value)
        assert 16 < count < 127
        await until_refused(history, writer.listen, LOG_FULL)
        await bucket.appear()
        await until_accepted(history, writer.listen)
        await writer.kill()
        writer = await cluster.serve(*TELLING, *ALONE, create=False)
        async with Client(writer.listen, timeout_ms=TIMEOUT_MS) as client:
            for number in range(count):
                found = await client.get(b"large/%d" % number)
                assert found is not None
                assert found.value == value


async def test_too_little_disk_space_is_free(processes: Processes, tmp_path: Path) -> None:
    """Safekeepers with less free disk space than they must leave take no records and are sound:
    with one of them writes continue, with a majority they are refused, and reads continue.
    """
    nodes = ("--segment-bytes", "65536", "--disk-free-bytes-min", "0")
    cluster = await Cluster.started(processes, tmp_path, *nodes)
    writer = await cluster.serve(*TELLING, *ALONE)
    async with loads() as running:
        history = running.history
        for index in (0, 1):
            load = await running.begin(writer)
            await rest(load)
            await cluster.kill([index])
            await cluster.start_node(index, *NEVER_ENOUGH)
        await until_refused(history, writer.listen, LOG_FULL)
        row = await cluster.status_of(1)
        assert row["health"] == "sound", row
        assert row["problem"], row
        history.check_state(await read_state(writer.listen))
        await cluster.kill([1])
        await cluster.start_node(1)
        await until_accepted(history, writer.listen)
        await check_archived(cluster.folder, writer, history)
