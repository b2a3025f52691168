"""Watches that begin in the past: at every commit that is left, and at none before."""

from __future__ import annotations

import pytest

from shalekv.core.key_range import KeyRange
from shalekv.engine.watching.history import FOOTER_BYTES
from shalekv.format import names
from tests.kit.engine.databases import Database
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


@pytest.mark.parametrize("collected", [2, 6, 11, 16])
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
