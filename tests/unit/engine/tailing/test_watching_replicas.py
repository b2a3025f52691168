"""Watches at a replica of a quorum database: every commit once, in order, and at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.engine.reader_engine import ReaderEngine
from shalekv.format.sst import Sst
from shalekv.roles.engine_watches import watches_of
from shalekv.roles.reader_kv import reader_header
from shalekv.settings import StoreSettings, WatchSettings
from shalekv.store.cas import CasStore
from tests.kit.engine.replica import running
from tests.kit.serving.watchers import TIMELESS, WatchClient
from tests.kit.virtual_time import virtual_time
from tests.unit.engine.tailing.cluster import QuorumCluster, steps

READS_MAX = 20  # of the log, until a watch is told by the feed


@asynccontextmanager
async def watching(
    cluster: QuorumCluster, engine: ReaderEngine, **fields: Any
) -> AsyncIterator[WatchClient]:
    cas = CasStore(cluster.another_store(), cluster.local_runtime(), StoreSettings())

    def header(seq: int, wal_id: int | None) -> Any:
        return reader_header(engine, seq, wal_id)

    watches = watches_of(engine, cas, WatchSettings.model_validate(TIMELESS), header)
    client = WatchClient(watches)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.run())
        client.create(**fields)
        try:
            yield client
        finally:
            task.cancel()


@pytest.mark.parametrize("wants_previous", [False, True])
@virtual_time(seed=1)
async def test_watch_catches_up_although_commits_never_pause(
    monkeypatch: pytest.MonkeyPatch, *, wants_previous: bool
) -> None:
    """Commits come whenever the end of the log is read: the feed has the watch nevertheless, after
    a few reads, and each commit is told once.
    """
    cluster = await QuorumCluster.opened()
    engine = await cluster.replica()
    async with running(engine):
        await steps(lambda: engine.is_told)
        puts = reads = 0
        held_object = engine.held_object

        async def put() -> None:
            nonlocal puts
            seq = await cluster.put(a=b"%d" % puts)
            puts += 1
            await steps(lambda: engine.prefix.seq >= seq)

        async def held_while_commits_come(wal_id: int) -> Sst | None:
            nonlocal reads
            reads += 1
            await put()
            held = await held_object(wal_id)
            await put()
            return held

        monkeypatch.setattr(engine, "held_object", held_while_commits_come)
        await put()
        fields = {"start_seq": 1, "previous_value": wants_previous}
        async with watching(cluster, engine, **fields) as client:
            await client.opened()
            while not engine.feed.audience.count:
                await asyncio.sleep(0)
                assert reads <= READS_MAX
            await put()
            told = [await client.commit() for _ in range(puts)]
        values = [commit.changes[0].entry.value for commit in told]
        assert values == [b"%d" % number for number in range(puts)]
        if wants_previous:
            before = [commit.changes[0].previous.value for commit in told]
            assert before == [b"", *values[:-1]]
