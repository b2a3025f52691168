"""Slow clients: bounded in memory, served from the store later, cut in the end; others go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shalekv.errors import Stopping
from shalekv.format import names
from shalekv.protocol.entry import KeyRange
from shalekv.v1 import kv_pb2
from shalekv.watch.catch_up import TURNS
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import HOUR_MS, WatchClient, Watched, watched
from tests.unit.watch.truth import told, truth

ALL = KeyRange(b"", b"")
STREAM_BYTES = 65_536
SMALL: dict[str, Any] = {"watch_stream_bytes_max": STREAM_BYTES, "watch_bytes_max": 262_144}
VALUE_BYTES = 4_000
COUNT = 60  # of such values: several times what a stream may hold


async def fill(under: Watched, count: int = COUNT) -> int:
    """Write more than a stream may hold; the last commit."""
    last_seq = 0
    for number in range(count):
        reply = await under.writer.put(b"k%d" % number, bytes(VALUE_BYTES))
        last_seq = reply.header.seq
    return last_seq


async def fallen_behind(under: Watched) -> None:
    while not under.watches.status().catching_up:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)


async def opened(under: Watched, **fields: Any) -> WatchClient:
    client = under.client()
    client.create(**fields)
    await client.opened()
    return client


async def test_slow_stream_is_bounded_and_misses_nothing() -> None:
    """A client that takes nothing holds no more than the bound; when it takes again it is told
    all that it missed, from the store, and then goes on with the feed.
    """
    async with watched(watching=SMALL) as under:
        client = await opened(under)
        last_seq = await fill(under)
        await fallen_behind(under)
        assert under.watches.held_bytes <= STREAM_BYTES
        assert under.writer.engine.feed.is_idle
        assert told(await client.until(last_seq)) == await truth(under.database, ALL)
        assert (await client.take()).progress_seq == last_seq
        assert under.watches.status().catching_up == 0
        await under.writer.put(b"next")
        assert (await client.commit()).seq == last_seq + 1
        assert under.watches.status().cut == 0


async def test_stuck_stream_is_cut_and_goes_on_where_it_was() -> None:
    """A stream of which nothing is taken is cut with WATCH_TOO_SLOW: `next_seq` and what was taken
    before are the whole history, without gap or double.
    """
    async with watched(watching=SMALL | {"watch_progress_ms": 10}) as under:
        client = await opened(under)
        last_seq = await fill(under)
        commits = [await client.commit()]
        under.clock.ahead_ms += HOUR_MS
        while not under.watches.status().cut:  # noqa: ASYNC110 - it is seen from outside alone
            await asyncio.sleep(0)
        assert under.watches.held_bytes < 10_000
        assert under.writer.engine.feed.is_idle
        closed = await client.closed()
        assert (closed.code, closed.reason) == (10, "WATCH_TOO_SLOW")
        next_seq = int(closed.metadata["next_seq"])
        client.create(2, start_seq=next_seq)
        assert await client.opened(2) == next_seq
        commits += await client.until(last_seq, 2)
        assert told(commits) == await truth(under.database, ALL)


async def test_streams_stuck_within_an_object_do_not_hold_up_others() -> None:
    """Streams that stop in the middle of what was read for them let others read; when they go on,
    they are told the rest of the object, once, with the values before.
    """
    async with watched(watching=SMALL) as under:
        put = under.writer.put
        await asyncio.gather(*[put(b"k%d" % number, b"old") for number in range(COUNT)])
        new = b"new" + bytes(VALUE_BYTES)
        replies = await asyncio.gather(*[put(b"k%d" % number, new) for number in range(COUNT)])
        assert len({reply.header.wal_id for reply in replies}) < COUNT / 10
        last_seq = max(reply.header.seq for reply in replies)
        history = await truth(under.database, ALL)
        stuck = [
            await opened(under, start_seq=1, previous_value=True, range=kv_pb2.KeyRange())
            for _ in range(TURNS)
        ]
        quick = await opened(under, start_seq=1)
        assert told(await quick.until(last_seq)) == history
        for client in stuck:
            commits = await client.until(last_seq)
            assert told(commits) == history
            before = [commit.changes[0].previous.value for commit in commits]
            assert before == [b""] * COUNT + [b"old"] * COUNT


async def test_behind_what_is_collected() -> None:
    """A slow watch that comes back when the WAL it needs is gone gets what had waited for it, and
    then WAL_COLLECTED with the oldest commit that is left, where it can begin.
    """
    async with watched(watching=SMALL, fence_poll_ms=10) as under:
        client = await opened(under)
        last_seq = await fill(under)
        await fallen_behind(under)
        await compact(under.database)
        wal = await under.database.wal()
        await under.database.remove(*map(names.wal_name, wal[:-5]))
        taken = []
        while (reply := await client.take()).WhichOneof("event") == "commit":
            taken.append(reply.commit)
        history = await truth(under.database, ALL)
        assert [commit.seq for commit in taken] == [*range(1, len(taken) + 1)]
        assert (reply.closed.code, reply.closed.reason) == (11, "WAL_COLLECTED")
        oldest_seq = int(reply.closed.metadata["oldest_seq"])
        assert oldest_seq == history[0][0] > len(taken) + 1
        client.create(2, start_seq=oldest_seq)
        await client.opened(2)
        assert told(await client.until(last_seq, 2)) == history


async def test_stream_without_requests_ends_with_its_last_watch() -> None:
    """A client that asks for nothing more is told on until no watch is left."""
    async with watched() as under:
        client = await opened(under)
        client.end()
        await under.writer.put(b"a")
        assert (await client.commit()).seq == 1
    async with watched() as under:
        client = await opened(under)
        client.cancel()
        client.end()
        assert (await client.closed()).code == 0
        with pytest.raises(StopAsyncIteration):
            await client.take()


async def test_refused_stream_ends_at_once_whatever_waits() -> None:
    """When the server stops, each watch is told STOPPING and the stream ends with that: what
    waited is let go of, so that a stuck client cannot hold up the end.
    """
    async with watched(watching=SMALL) as under:
        client = await opened(under)
        client.create(2, b"other")
        await client.opened(2)
        await fill(under)
        client.stream.refuse(Stopping("the end"))
        assert {(await client.closed()).reason, (await client.closed()).reason} == {"STOPPING"}
        with pytest.raises(Stopping, match="the end"):
            await client.take()
