"""Slow clients: their memory is bounded, they catch up from the store, stalled ones are cut."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shalekv.errors import Stopping
from shalekv.format import names
from shalekv.protocol.entry import KeyRange
from shalekv.v1 import kv_pb2
from shalekv.watch.catch_up import READING_PASSES_MAX
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import HOUR_MS, WatchClient, Watched, watched
from tests.unit.watch.truth import expected_commits, reported

ALL = KeyRange(b"", b"")
STREAM_BYTES = 65_536
SMALL: dict[str, Any] = {"watch_bytes_max": 262_144}
VALUE_BYTES = 4_000
COUNT = 60  # of such values, which is several times what a stream may queue


async def fill(cluster: Watched, count: int = COUNT) -> int:
    """Write more than a stream may queue; return the last commit."""
    last_seq = 0
    for number in range(count):
        reply = await cluster.writer.put(b"k%d" % number, bytes(VALUE_BYTES))
        last_seq = reply.header.seq
    return last_seq


async def until_behind(cluster: Watched) -> None:
    while not cluster.watches.status().catching_up:  # noqa: ASYNC110 - no event signals it
        await asyncio.sleep(0)


async def opened(cluster: Watched, **fields: Any) -> WatchClient:
    client = cluster.client()
    client.create(**fields)
    await client.opened()
    return client


async def test_slow_stream_is_bounded_and_misses_nothing() -> None:
    """A client that takes nothing holds no more than the bound; when it takes again, it gets
    everything it missed from the store, and then follows the feed.
    """
    async with watched(watching=SMALL) as cluster:
        client = await opened(cluster)
        last_seq = await fill(cluster)
        await until_behind(cluster)
        assert cluster.watches.held_bytes <= STREAM_BYTES
        assert cluster.writer.engine.feed.is_idle
        assert reported(await client.until(last_seq)) == await expected_commits(
            cluster.database, ALL
        )
        assert (await client.take()).progress_seq == last_seq
        assert cluster.watches.status().catching_up == 0
        await cluster.writer.put(b"next")
        assert (await client.commit()).seq == last_seq + 1
        assert cluster.watches.status().cut == 0


async def test_stalled_stream_is_cut_and_resumes_at_next_seq() -> None:
    """A stream of which nothing is taken is cut with WATCH_TOO_SLOW: what was taken before and the
    commits from `next_seq` on are the whole history, without gap or duplicate.
    """
    async with watched(watching=SMALL | {"watch_progress_ms": 10}) as cluster:
        client = await opened(cluster)
        last_seq = await fill(cluster)
        commits = [await client.commit()]
        cluster.clock.ahead_ms += HOUR_MS
        while not cluster.watches.status().cut:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0)
        assert cluster.watches.held_bytes < 10_000
        assert cluster.writer.engine.feed.is_idle
        closed = await client.closed()
        assert (closed.code, closed.reason) == (10, "WATCH_TOO_SLOW")
        next_seq = int(closed.metadata["next_seq"])
        client.create(2, start_seq=next_seq)
        assert await client.opened(2) == next_seq
        commits += await client.until(last_seq, 2)
        assert reported(commits) == await expected_commits(cluster.database, ALL)


async def test_streams_stalled_within_an_object_do_not_block_others() -> None:
    """Streams that stall in the middle of an object let other streams read; when they go on, they
    get the rest of the object, once, with the previous values.
    """
    async with watched(watching=SMALL) as cluster:
        put = cluster.writer.put
        await asyncio.gather(*[put(b"k%d" % number, b"old") for number in range(COUNT)])
        new = b"new" + bytes(VALUE_BYTES)
        replies = await asyncio.gather(*[put(b"k%d" % number, new) for number in range(COUNT)])
        assert len({reply.header.wal_id for reply in replies}) < COUNT / 10
        last_seq = max(reply.header.seq for reply in replies)
        history = await expected_commits(cluster.database, ALL)
        stalled = [
            await opened(cluster, start_seq=1, previous_value=True, range=kv_pb2.KeyRange())
            for _ in range(READING_PASSES_MAX)
        ]
        quick = await opened(cluster, start_seq=1)
        assert reported(await quick.until(last_seq)) == history
        for client in stalled:
            commits = await client.until(last_seq)
            assert reported(commits) == history
            before = [commit.changes[0].previous.value for commit in commits]
            assert before == [b""] * COUNT + [b"old"] * COUNT


async def test_slow_watch_needs_what_is_collected() -> None:
    """A slow watch that goes on when the WAL it needs is gone gets what was queued for it, and then
    WAL_COLLECTED with the oldest commit that is left, where a new watch can begin.
    """
    async with watched(watching=SMALL, fence_poll_ms=10) as cluster:
        client = await opened(cluster)
        last_seq = await fill(cluster)
        await until_behind(cluster)
        await compact(cluster.database)
        wal = await cluster.database.wal()
        await cluster.database.remove(*map(names.wal_name, wal[:-5]))
        taken = []
        while (reply := await client.take()).WhichOneof("event") == "commit":
            taken.append(reply.commit)
        history = await expected_commits(cluster.database, ALL)
        assert [commit.seq for commit in taken] == [*range(1, len(taken) + 1)]
        assert (reply.closed.code, reply.closed.reason) == (11, "WAL_COLLECTED")
        oldest_seq = int(reply.closed.metadata["oldest_seq"])
        assert oldest_seq == history[0][0] > len(taken) + 1
        client.create(2, start_seq=oldest_seq)
        await client.opened(2)
        assert reported(await client.until(last_seq, 2)) == history


async def test_stream_without_requests_ends_with_its_last_watch() -> None:
    """A client that has ended its requests gets replies until no watch is left."""
    async with watched() as cluster:
        client = await opened(cluster)
        client.end()
        await cluster.writer.put(b"a")
        assert (await client.commit()).seq == 1
    async with watched() as cluster:
        client = await opened(cluster)
        client.cancel()
        client.end()
        assert (await client.closed()).code == 0
        with pytest.raises(StopAsyncIteration):
            await client.take()


async def test_refused_stream_ends_at_once_without_its_queue() -> None:
    """When the server stops, each watch is closed with STOPPING and the stream ends with it: queued
    commits are dropped, so that a stalled client cannot delay the shutdown.
    """
    async with watched(watching=SMALL) as cluster:
        client = await opened(cluster)
        client.create(2, b"other")
        await client.opened(2)
        await fill(cluster)
        client.stream.refuse(Stopping("the end"))
        assert {(await client.closed()).reason, (await client.closed()).reason} == {"STOPPING"}
        with pytest.raises(Stopping, match="the end"):
            await client.take()
