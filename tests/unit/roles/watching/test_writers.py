"""What writers do to each other's slots is never seen by a watch but as the log that it makes."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shalekv.core.key_range import KeyRange
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import serving
from tests.kit.serving.watchers import watched
from tests.unit.roles.watching.truth import told, truth

ALL = KeyRange(b"", b"")
SEEDS = range(10)


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
    random = Random(seed)
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
