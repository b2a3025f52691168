"""A watch reports every commit to its range whole, once and in order, wherever it begins."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from shalekv.format import names
from shalekv.protocol.entry import KeyRange, prefix_end
from shalekv.v1 import kv_pb2
from shalekv.watch.history import FOOTER_BYTES
from tests.kit.constants import set_constants
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.seeds import random_of
from tests.kit.serving.roles import delete, delete_range, follow, put, serving
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import WatchClient, Watched, watched
from tests.unit.watch.truth import ValuesBefore, expected_commits, reported, values_before

ALL = KeyRange(b"", b"")
OPENINGS = 4  # each puts one fence or more between the commits
WRITES_PER_OPENING = 5


async def database_with_fences() -> Database:
    """Create a database with commits of several writers, and fences between them."""
    database = await Database.created()
    for number in range(OPENINGS):
        async with serving(database, max_parallel_writes=1 + number) as writer:
            for key in range(WRITES_PER_OPENING):
                await writer.put(b"%d/%d" % (number, key))
    return database


async def check_every_start(cluster: Watched, first_seq: int = 1) -> None:
    """Check that a watch from each commit on, and from after it, reports exactly what follows."""
    last_seq = cluster.writer.engine.watermark.seq
    client = cluster.client()
    starts = [seq for seq, _ in await expected_commits(cluster.database, ALL, first_seq)]
    starts += [seq + 1 for seq in starts[:-1]]
    for watch_id, seq in enumerate(starts):
        client.create(watch_id, start_seq=seq)
        assert await client.opened(watch_id) == seq
        found = await client.until(last_seq, watch_id)
        assert reported(found) == await expected_commits(cluster.database, ALL, seq)
        client.cancel(watch_id)
        await client.closed()


async def test_watch_begins_at_what_is_compacted() -> None:
    """Commits that are compacted and still in the WAL are reported as well."""
    database = await database_with_fences()
    await compact(database)
    async with watched(database) as cluster:
        await cluster.writer.put(b"more")
        await check_every_start(cluster)


@pytest.mark.parametrize("collected", [2, 11])
async def test_watch_begins_at_the_oldest_commit_left(collected: int) -> None:
    """A watch that would begin before the oldest commit left is refused with that commit, and can
    begin there and after it. A single older object before a gap does not count.
    """
    database = await database_with_fences()
    await compact(database)
    wal = await database.wal()
    await database.remove(*map(names.wal_name, wal[1:collected]))
    async with watched(database) as cluster:
        left = await expected_commits(database, ALL)
        client = cluster.client()
        client.create(start_seq=1)
        closed = await client.closed()
        assert (closed.code, closed.reason) == (11, "WAL_COLLECTED")
        oldest_seq = int(closed.metadata["oldest_seq"])
        assert oldest_seq in dict(left)
        client.create(2, start_seq=oldest_seq - 1)
        assert (await client.closed()).reason == "WAL_COLLECTED"
        await check_every_start(cluster, oldest_seq)


async def test_nothing_compacted_is_left() -> None:
    """When everything compacted is collected, a watch can begin after the levels, not before."""
    database = await database_with_fences()
    await compact(database)
    await database.remove(*map(names.wal_name, await database.wal()))
    async with watched(database) as cluster:
        compacted_seq = (await database.manifest()).last_compacted_seq
        last_seq = (await cluster.writer.put(b"new")).header.seq
        client = cluster.client()
        client.create(start_seq=compacted_seq)
        assert (await client.closed()).metadata["oldest_seq"] == str(compacted_seq + 1)
        client.create(2, start_seq=compacted_seq + 1)
        await client.opened(2)
        assert [commit.seq for commit in await client.until(last_seq, 2)] == [last_seq]


async def test_long_footers_are_read() -> None:
    """Objects are found even if their footers are longer than the part that is fetched first."""
    database = await Database.created()
    async with watched(database) as cluster:
        for number in range(6):
            await cluster.writer.put(b"%d" % number + bytes(FOOTER_BYTES))
        await check_every_start(cluster)


async def test_commit_after_a_gap_is_reported_when_the_gap_is_filled() -> None:
    """A commit that is durable after a gap, and acknowledged, is reported once that is filled."""
    async with watched(max_parallel_writes=2) as cluster:
        client = cluster.client()
        client.create(previous_value=True)
        await client.opened()
        store = cluster.writer.store
        store.is_holding = True
        first = asyncio.ensure_future(cluster.writer.put(b"a", b"first"))
        await store.arrived(1)
        second = asyncio.ensure_future(cluster.writer.put(b"a", b"second"))
        await store.arrived(2)
        store.held[1].release()
        await second
        taken = asyncio.ensure_future(client.commit())
        await quiesce()
        assert not taken.done()
        late = cluster.client()
        late.create()
        # A commit that is acknowledged and not yet reported is reported to the new watch.
        assert await late.opened() == 1
        store.release_all()
        await first
        commits = [await taken, await client.commit()]
        assert [each.changes[0].entry.value for each in commits] == [b"first", b"second"]
        assert commits[1].changes[0].previous.value == b"first"
        assert reported([await late.commit(), await late.commit()]) == reported(commits)


@pytest.mark.parametrize("seed", range(4))
async def test_displaced_commits_are_reported_under_their_final_numbers(seed: int) -> None:
    """Commits whose slots were taken by an older writer's fences are reported once, under their
    final numbers, in whichever order their objects land.
    """
    random = random_of(f"past/{seed}")
    database = await Database.created()
    async with serving(database) as older:
        await older.put(b"before")
        owner = older.engine.manifest.own
    async with watched(database, max_parallel_writes=3) as cluster:
        client = cluster.client()
        client.create(start_seq=1, previous_value=True)
        await client.opened()
        store = cluster.writer.store
        next_wal_id = cluster.writer.engine.log.next_wal_id
        for slot in random.sample(range(5), 2):
            await database.fill(next_wal_id + slot, owner)
        store.is_holding = True
        writes = [
            asyncio.ensure_future(cluster.writer.put(b"%d" % (number % 3), b"%d" % number))
            for number in range(12)
        ]
        while not all(write.done() for write in writes):
            await quiesce()
            if store.waiting:
                random.choice(store.waiting).release()
        store.release_all()
        last_seq = max(write.result().header.seq for write in writes)
        assert reported(await client.until(last_seq)) == await expected_commits(database, ALL)


SEEDS = range(3)
WRITES = 80
KEYS = 30
SMALL: dict[str, Any] = {"watch_bytes_max": 262_144}
RANGES = [b"", b"k", b"k1", b"k2", b"k15"]


def some_write(random: Random) -> kv_pb2.WriteRequest:
    """Make a batch of random puts, deletes and range deletes."""
    changes = []
    for _ in range(random.choice([1, 1, 2, 8])):
        key = b"k%d" % random.randrange(KEYS)
        kind = random.random()
        if kind < 0.75:
            changes.append(put(key, random.randbytes(random.choice([1, 10, 3_000]))))
        elif kind < 0.9:
            changes.append(delete(key))
        else:
            start, end = random.choice([key, b"a"]), random.choice([key + b"5", b"z"])
            changes.append(delete_range(start=start, end=end))
    return kv_pb2.WriteRequest(changes=changes)


async def write(watched: Watched, random: Random, count: int) -> int:
    """Write concurrently, so that objects hold several commits; return the last commit."""
    replies = await asyncio.gather(*(watched.writer.ask(some_write(random)) for _ in range(count)))
    seqs: list[int] = [reply.header.seq for reply in replies]
    return max(seqs)


def range_of(prefix: bytes) -> KeyRange:
    return KeyRange(prefix, prefix_end(prefix))


class Reported:
    """The replies that one watch has got."""

    def __init__(self) -> None:
        self.opened_at_seq = 0
        self.commits: list[kv_pb2.WatchCommit] = []


async def replies_until(client: WatchClient, last_seq: int) -> list[Reported]:
    """Take replies until each watch of a client has reported everything up to `last_seq`."""
    found = [Reported() for _ in RANGES]
    waiting = {*range(len(RANGES))}
    while waiting:
        reply = await client.take()
        kind = reply.WhichOneof("event")
        each = found[reply.watch_id]
        assert kind != "closed", reply
        if kind == "opened_at_seq":
            assert not each.opened_at_seq
            each.opened_at_seq = reply.opened_at_seq
            continue
        assert each.opened_at_seq
        if kind == "commit":
            each.commits.append(reply.commit)
        seen_seq = reply.commit.seq if kind == "commit" else reply.progress_seq
        if seen_seq >= last_seq and not reply.commit.more:
            waiting.discard(reply.watch_id)
    return found


def check_previous(commit: kv_pb2.WatchCommit, expected: ValuesBefore, *, is_known: bool) -> None:
    for change in commit.changes:
        if change.kind == kv_pb2.WatchChange.KIND_DELETE_RANGE or change.previous_unknown:
            assert not change.HasField("previous")
            assert not change.previous_unknown or not is_known
        else:
            value = change.previous.value if change.HasField("previous") else None
            assert value == expected[commit.seq, change.entry.key]


@pytest.mark.parametrize("seed", SEEDS)
async def test_watches_report_exactly_the_log(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches of many ranges, from the past and from now on, report exactly the log, on fast and
    slow streams, during writes with several objects in flight. Values before are unknown only
    where a watch began before the end of the levels.
    """
    random = random_of(f"told_once/{seed}")
    watching = SMALL | {"watch_progress_ms": 10}
    set_constants(monkeypatch, {"shalekv.write.recovery:SEGMENT_BYTES_MAX": 65_536})
    parallel = random.choice([1, 4])
    async with watched(max_parallel_writes=parallel, watching=watching) as cluster:
        await write(cluster, random, WRITES)
        await compact(cluster.database)
        await follow(cluster.writer)
        leveled_seq = cluster.writer.engine.levels.current.version.last_seq
        clients = [cluster.client() for _ in range(4)]
        starts = [random.choice([0, 1, random.randrange(1, WRITES), WRITES + 50]) for _ in clients]
        for client, start in zip(clients, starts, strict=True):
            for number, prefix in enumerate(RANGES):
                client.create(number, prefix, start_seq=start, previous_value=True)
        last_seq = max([await write(cluster, random, WRITES) for _ in range(3)])
        reading = [asyncio.create_task(replies_until(each, last_seq)) for each in clients]
        await write(cluster, random, WRITES)
        found_before = await values_before(cluster.database)
        for client, task, start in zip(clients, reading, starts, strict=True):
            client.end()
            for prefix, found in zip(RANGES, await task, strict=True):
                assert found.opened_at_seq == start or (not start and found.opened_at_seq > WRITES)
                expected = await expected_commits(
                    cluster.database, range_of(prefix), found.opened_at_seq, last_seq
                )
                assert reported(found.commits, last_seq) == expected, (start, prefix)
                is_known = found.opened_at_seq > leveled_seq
                for commit in found.commits:
                    check_previous(commit, found_before, is_known=is_known)
        status = cluster.watches.status()
        assert status.cut == 0
