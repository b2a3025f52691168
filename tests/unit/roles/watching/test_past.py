"""Watches that begin in the past, and past what writers do to each other."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.core.key_range import KeyRange
from shalekv.engine.watching.history import FOOTER_BYTES
from shalekv.format import names
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.seeds import random_of
from tests.kit.serving.roles import serving
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import Watched, watched
from tests.unit.roles.watching.truth import told, truth

ALL = KeyRange(b"", b"")
OPENINGS = 4  # each puts fences between the commits, some of them several
WRITES = 5


async def with_fences() -> Database:
    """A database with commits of several writers, and fences between them."""
    database = await Database.created()
    for number in range(OPENINGS):
        async with serving(database, max_parallel_writes=1 + number) as writer:
            for key in range(WRITES):
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


async def test_finds_its_way_past_long_keys() -> None:
    """Objects whose footers are longer than what is fetched of them at first are found, too."""
    database = await Database.created()
    async with watched(database) as under:
        for number in range(6):
            await under.writer.put(b"%d" % number + bytes(FOOTER_BYTES))
        await from_each(under)


SEEDS = range(4)


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


@pytest.mark.parametrize("seed", SEEDS)
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
