"""Every commit to the range is told, whole and exactly once, in order, however a watch begins."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from shalekv.format import names
from shalekv.protocol.entry import KeyRange, prefix_end
from shalekv.v1 import kv_pb2
from shalekv.watch.history import FOOTER_BYTES
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.seeds import random_of
from tests.kit.serving.roles import delete, delete_range, follow, put, serving
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import WatchClient, Watched, watched
from tests.unit.watch.truth import ValuesBefore, told, truth, values_before

ALL = KeyRange(b"", b"")
OPENINGS = 4  # each puts fences between the commits, some of them several
WRITES_OF_EACH = 5


async def with_fences() -> Database:
    """A database with commits of several writers, and fences between them."""
    database = await Database.created()
    for number in range(OPENINGS):
        async with serving(database, max_parallel_writes=1 + number) as writer:
            for key in range(WRITES_OF_EACH):
                await writer.put(b"%d/%d" % (number, key))
    return database


async def from_each(under: Watched, first_seq: int = 1) -> None:
    """A watch from each commit on, and from behind it, tells exactly what is there from then on."""
    last_seq = under.writer.engine.prefix.seq
    client = under.client()
    starts = [seq for seq, _ in await truth(under.database, ALL, first_seq)]
    starts += [seq + 1 for seq in starts[:-1]]
    for watch_id, seq in enumerate(starts):
        client.create(watch_id, start_seq=seq)
        assert await client.opened(watch_id) == seq
        found = await client.until(last_seq, watch_id)
        assert told(found) == await truth(under.database, ALL, seq)
        client.cancel(watch_id)
        await client.closed()


async def test_begins_below_the_levels() -> None:
    """What is compacted and still in the WAL is told as well."""
    database = await with_fences()
    await compact(database)
    async with watched(database) as under:
        await under.writer.put(b"more")
        await from_each(under)


@pytest.mark.parametrize("collected", [2, 11])
async def test_begins_at_the_oldest_that_is_left(collected: int) -> None:
    """Before the oldest commit that is left, a watch is refused, and told where it can begin;
    there, and behind it, it begins. An older object that was left alone does not count.
    """
    database = await with_fences()
    await compact(database)
    wal = await database.wal()
    await database.remove(*map(names.wal_name, wal[1:collected]))
    async with watched(database) as under:
        left = await truth(database, ALL)
        client = under.client()
        client.create(start_seq=1)
        closed = await client.closed()
        assert (closed.code, closed.reason) == (11, "WAL_COLLECTED")
        oldest_seq = int(closed.metadata["oldest_seq"])
        assert oldest_seq in dict(left)
        client.create(2, start_seq=oldest_seq - 1)
        assert (await client.closed()).reason == "WAL_COLLECTED"
        await from_each(under, oldest_seq)


async def test_nothing_compacted_is_left() -> None:
    """When all that is compacted is collected, a watch can begin behind the levels, not before."""
    database = await with_fences()
    await compact(database)
    await database.remove(*map(names.wal_name, await database.wal()))
    async with watched(database) as under:
        compacted_seq = (await database.manifest()).last_compacted_seq
        last_seq = (await under.writer.put(b"new")).header.seq
        client = under.client()
        client.create(start_seq=compacted_seq)
        assert (await client.closed()).metadata["oldest_seq"] == str(compacted_seq + 1)
        client.create(2, start_seq=compacted_seq + 1)
        await client.opened(2)
        assert [commit.seq for commit in await client.until(last_seq, 2)] == [last_seq]


async def test_finds_its_way_past_long_keys() -> None:
    """Objects whose footers are longer than what is fetched of them at first are found, too."""
    database = await Database.created()
    async with watched(database) as under:
        for number in range(6):
            await under.writer.put(b"%d" % number + bytes(FOOTER_BYTES))
        await from_each(under)


async def test_nothing_is_told_before_what_stands_before_it() -> None:
    """A commit that is durable behind a gap, and acknowledged, is told when the gap is filled."""
    async with watched(max_parallel_writes=2) as under:
        client = under.client()
        client.create(previous_value=True)
        await client.opened()
        store = under.writer.store
        store.is_holding = True
        first = asyncio.ensure_future(under.writer.put(b"a", b"first"))
        await store.arrived(1)
        second = asyncio.ensure_future(under.writer.put(b"a", b"second"))
        await store.arrived(2)
        store.held[1].release()
        await second
        taken = asyncio.ensure_future(client.commit())
        await quiesce()
        assert not taken.done()
        late = under.client()
        late.create()
        assert await late.opened() == 1  # what is acknowledged and not told yet is told to it
        store.let_go()
        await first
        commits = [await taken, await client.commit()]
        assert [each.changes[0].entry.value for each in commits] == [b"first", b"second"]
        assert commits[1].changes[0].previous.value == b"first"
        assert told([await late.commit(), await late.commit()]) == told(commits)


@pytest.mark.parametrize("seed", range(4))
async def test_displaced_commits_are_told_where_they_land(seed: int) -> None:
    """Commits whose slots were taken by the fences of an older writer are told once, under the
    numbers that they got in the end, whatever lands first.
    """
    random = random_of(f"past/{seed}")
    database = await Database.created()
    async with serving(database) as older:
        await older.put(b"before")
        owner = older.engine.manifest.own
    async with watched(database, max_parallel_writes=3) as under:
        client = under.client()
        client.create(start_seq=1, previous_value=True)
        await client.opened()
        store = under.writer.store
        next_wal_id = under.writer.engine.log.next_wal_id
        for slot in random.sample(range(5), 2):
            await database.fill(next_wal_id + slot, owner)
        store.is_holding = True
        writes = [
            asyncio.ensure_future(under.writer.put(b"%d" % (number % 3), b"%d" % number))
            for number in range(12)
        ]
        while not all(write.done() for write in writes):
            await quiesce()
            if store.waiting:
                random.choice(store.waiting).release()
        store.let_go()
        last_seq = max(write.result().header.seq for write in writes)
        assert told(await client.until(last_seq)) == await truth(database, ALL)


SEEDS = range(3)
WRITES = 80
KEYS = 30
SMALL: dict[str, Any] = {"watch_stream_bytes_max": 65_536, "watch_bytes_max": 262_144}
RANGES = [b"", b"k", b"k1", b"k2", b"k15"]


def some_write(random: Random) -> kv_pb2.WriteRequest:
    """Some changes of some keys, at times a range delete among them."""
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
    """Many writes at once, so that objects hold several commits; the last commit."""
    replies = await asyncio.gather(*(watched.writer.ask(some_write(random)) for _ in range(count)))
    seqs: list[int] = [reply.header.seq for reply in replies]
    return max(seqs)


def whole(prefix: bytes) -> KeyRange:
    return KeyRange(prefix, prefix_end(prefix))


class Found:
    """What one watch was told."""

    def __init__(self) -> None:
        self.opened_at_seq = 0
        self.commits: list[kv_pb2.WatchCommit] = []


async def everything(client: WatchClient, last_seq: int) -> list[Found]:
    """What each watch of a client is told until all of them have seen `last_seq`."""
    found = [Found() for _ in RANGES]
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
async def test_watches_tell_the_log(seed: int) -> None:
    """Watches from the past and from now on, of many ranges, on streams that are taken fast or
    late, while writes go on with several objects in flight: each tells exactly the log, with the
    values before, which are unknown only where it began before what the levels hold.
    """
    random = random_of(f"told_once/{seed}")
    watching = SMALL | {"watch_progress_ms": 10}
    async with watched(
        max_parallel_writes=random.choice([1, 4]), watching=watching, memtable_segment_bytes=65_536
    ) as under:
        await write(under, random, WRITES)
        await compact(under.database)
        await follow(under.writer)
        leveled_seq = under.writer.engine.levels.current.tree.last_seq
        clients = [under.client() for _ in range(4)]
        starts = [random.choice([0, 1, random.randrange(1, WRITES), WRITES + 50]) for _ in clients]
        for client, start in zip(clients, starts, strict=True):
            for number, prefix in enumerate(RANGES):
                client.create(number, prefix, start_seq=start, previous_value=True)
        last_seq = max([await write(under, random, WRITES) for _ in range(3)])
        reading = [asyncio.create_task(everything(each, last_seq)) for each in clients]
        await write(under, random, WRITES)
        found_before = await values_before(under.database)
        for client, task, start in zip(clients, reading, starts, strict=True):
            client.end()
            for prefix, found in zip(RANGES, await task, strict=True):
                assert found.opened_at_seq == start or (not start and found.opened_at_seq > WRITES)
                expected = await truth(under.database, whole(prefix), found.opened_at_seq, last_seq)
                assert told(found.commits, last_seq) == expected, (start, prefix)
                is_known = found.opened_at_seq > leveled_seq
                for commit in found.commits:
                    check_previous(commit, found_before, is_known=is_known)
        status = under.watches.status()
        assert status.cut == 0
