"""A replica of a quorum database: what it sees and when, its staleness, and watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.format.sst import Sst
from shalekv.replica.engine import ReplicaEngine
from shalekv.server.reader_service import reader_header
from shalekv.server.watches import watches_of
from shalekv.settings import MIB, StoreSettings, WatchSettings
from shalekv.store.cas import CasStore
from tests.kit.engine.replica import all_shown, pass_s, running
from tests.kit.serving.watchers import TIMELESS, WatchClient
from tests.kit.store import FaultyStore
from tests.kit.virtual_time import virtual_time
from tests.unit.replica.cluster import QuorumCluster, shown, steps


async def tailing(engine: ReplicaEngine) -> None:
    await steps(lambda: engine.is_pushed)


@asynccontextmanager
async def tailed(**settings: Any) -> AsyncIterator[tuple[QuorumCluster, ReplicaEngine]]:
    """A new database and a replica of it that follows a live tail."""
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(**settings)
    async with running(engine):
        await tailing(engine)
        yield cluster, engine


def followed(cluster: QuorumCluster) -> int:
    """The number of the safekeeper whose tail is read."""
    (number,) = (
        at for at, safekeeper in enumerate(cluster.safekeepers) if cluster.tails(safekeeper)
    )
    return number


@virtual_time(seed=1)
async def test_tail_saves_the_polls_of_the_bucket() -> None:
    """While the tail is live no WAL object is requested; manifest and archive are polled slowly."""
    cluster = await QuorumCluster.opened()
    store = FaultyStore(cluster.another_store())
    settings = {"poll_interval_ms": 250, "manifest_interval_ms": 10_000}
    engine = await cluster.join(store, **settings)
    async with running(engine):
        await tailing(engine)
        await engine.catch_up()
        store.requests.clear()
        for number in range(60):
            seq = await cluster.put(a=b"%d" % number)
            await shown(engine, seq)
            if number % 10 == 0:
                cluster.seal()
                await steps(lambda: not engine.applier.position.is_open)
                await cluster.archive(trims=True)
            await pass_s(1)
        assert engine.watermark.seq == cluster.seq
        assert not store.asked("get", "wal/")
        assert len(store.asked("list")) <= 6 * 4  # a manifest, the archive, and the own snapshot
        assert cluster.links.status_count >= 60 * 4 * 2  # safekeepers are asked instead


@virtual_time(seed=1)
async def test_lagging_safekeeper_is_left() -> None:
    """A safekeeper that is cut off from the writer is left, although it is alive."""
    async with tailed(poll_interval_ms=250) as (cluster, engine):
        first = followed(cluster)
        cluster.safekeepers[first].hears = False
        seq = await cluster.put(a=b"1")
        await pass_s(1)
        assert engine.watermark.seq == seq
        assert followed(cluster) != first


@pytest.mark.parametrize("trims", [False, True])
@virtual_time(seed=1)
async def test_partly_applied_object_is_applied_once(*, trims: bool) -> None:
    """An object that was applied in part adds only the rest when it is read from the bucket."""
    async with tailed(poll_interval_ms=100) as (cluster, engine):
        seen = await cluster.put(a=b"1", b=b"1")
        await steps(lambda: engine.watermark.seq == seen)
        whole = engine.watermark.wal_id
        for safekeeper in cluster.safekeepers:
            safekeeper.node.stop()
        await cluster.put(a=b"2")
        cluster.seal()
        last = await cluster.put(c=b"1")
        cluster.seal()
        await cluster.archive(trims=trims)
        await pass_s(2)
        assert engine.watermark.seq == last
        assert engine.watermark.wal_id == cluster.leader.log.last.wal_id != whole
        assert await all_shown(engine) == {b"a": b"2", b"b": b"1", b"c": b"1"}
        assert engine.memtable.key_count == 3


@virtual_time(seed=1)
async def test_members_of_the_newest_manifest_are_tailed() -> None:
    """When all members have been replaced, the new ones are found, and the old ones left."""
    async with tailed(poll_interval_ms=100, manifest_interval_ms=1_000) as (cluster, engine):
        old = cluster.safekeepers
        await cluster.set_members(cluster.others)
        seq = await cluster.put(a=b"1")
        await pass_s(3)
        assert engine.watermark.seq == seq
        assert engine.is_pushed
        assert not any(cluster.tails(safekeeper) for safekeeper in old)


@virtual_time(seed=1)
async def test_full_memory_stops_the_tail() -> None:
    """The memory bound holds; what did not fit is read once earlier entries are compacted."""
    async with tailed(reader_memtable_bytes_max=MIB, poll_interval_ms=100) as (cluster, engine):
        for number in range(8):
            await cluster.put(**{f"k{number}": b"v" * (MIB // 4)})
            cluster.seal()
            await cluster.archive()
        await pass_s(1)
        assert engine.applier.memory.is_full
        assert not engine.is_pushed
        assert engine.watermark.seq < cluster.seq
        assert engine.memory_bytes < 2 * MIB
        await cluster.compact()
        await pass_s(3)
        assert engine.watermark.seq == cluster.seq
        assert engine.is_pushed
        assert len(await all_shown(engine)) == 8


@virtual_time(seed=1)
async def test_manifest_never_names_unarchived_objects() -> None:
    """The manifest never names a WAL object that a replica has seen only in a tail."""
    async with tailed(manifest_interval_ms=500) as (cluster, engine):
        await cluster.put(a=b"1")
        cluster.seal()
        await cluster.archive()
        await cluster.compact()
        for _ in range(3):
            await cluster.put(a=b"2")
            cluster.seal()
        await pass_s(30)
        assert engine.watermark.seq == cluster.seq
        seen = (await cluster.manifest()).wal_id_last_seen
        assert seen is not None
        assert seen <= max(await cluster.wal())


@virtual_time(seed=1)
async def test_an_object_behind_a_gap_in_the_archive_proves_nothing() -> None:
    """An object that is read from the store before older ones are there is not noted as archived.

    A safekeeper archives several objects at once.
    """
    async with tailed(manifest_interval_ms=500) as (cluster, engine):
        for _ in range(3):
            await cluster.put(a=b"1")
            cluster.seal()
        await pass_s(3)
        assert engine.watermark.seq == cluster.seq
        last = engine.applier.position.wal_id
        assert last is not None
        known = engine.applier.archived_wal_id
        found = await engine.unarchived_object(last)
        assert found is not None
        engine.applier.apply_object(found)  # as if it had been read from the store
        assert engine.applier.archived_wal_id == known
        assert await engine.unarchived_object(last) is not None
        await cluster.archive()
        await pass_s(30)
        assert engine.applier.archived_wal_id == last


def now_s() -> float:
    return asyncio.get_running_loop().time()


@virtual_time(seed=1)
async def test_one_safekeeper_proves_no_freshness() -> None:
    """A replica that reaches only one safekeeper, cut off from the writer, grows stale.

    It still applies what that safekeeper sends.
    """
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(poll_interval_ms=100, manifest_interval_ms=500)
    async with running(engine):
        await steps(lambda: engine.is_pushed)
        await engine.catch_up()
        last_s = now_s()
        cut_off, *others = cluster.safekeepers
        for safekeeper in others:
            safekeeper.node.stop()
        cut_off.hears = False
        await cluster.put(a=b"never seen")
        for _ in range(30):
            await pass_s(1)
            await engine.catch_up()
            assert engine.staleness_ms >= 1_000 * (now_s() - last_s) - 1
        assert engine.is_pushed
        assert engine.watermark.seq == 0
        cut_off.hears = True
        cluster.tell_commit()
        await steps(lambda: engine.watermark.seq == 1)
        assert engine.staleness_ms >= 30_000
        others[0].node.start()
        await engine.catch_up()
        assert engine.staleness_ms == 0


@virtual_time(seed=1)
async def test_freshness_needs_the_log_of_a_majority() -> None:
    """A tail behind the logs of the majority does not make the state fresh until it catches up."""
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(poll_interval_ms=60_000)
    async with running(engine):
        await steps(lambda: engine.is_pushed)
        await engine.catch_up()
        (followed,) = (
            safekeeper for safekeeper in cluster.safekeepers if cluster.tails(safekeeper)
        )
        followed.hears = False
        await cluster.put(a=b"1")
        await pass_s(5)
        before_s = now_s()
        await engine.catch_up()
        assert engine.watermark.seq == 0
        assert engine.staleness_ms >= 5_000
        followed.hears = True
        cluster.tell_commit()
        await steps(lambda: engine.watermark.seq == 1)
        assert engine.staleness_ms == 1_000 * (now_s() - before_s)


@virtual_time(seed=1)
async def test_members_that_were_replaced_make_nothing_fresh() -> None:
    """Until the manifest is read again, answers of replaced members make nothing fresh."""
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(poll_interval_ms=100, manifest_interval_ms=20_000)
    async with running(engine):
        await pass_s(5)
        await engine.catch_up()
        await cluster.set_members(cluster.others)
        changed_s = now_s()
        await cluster.put(a=b"1")
        for _ in range(10):
            await pass_s(1)
            assert engine.watermark.seq == 0
            assert engine.staleness_ms >= 1_000 * (now_s() - changed_s)
        await engine.catch_up()  # reads the manifest
        await pass_s(1)
        await engine.catch_up()
        assert engine.watermark.seq == 1
        assert engine.staleness_ms == 0


@virtual_time(seed=1)
async def test_archive_alone_is_as_old_as_its_last_commit() -> None:
    """Without a tail, the state is as old as the last archived commit."""
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(tail="off", poll_interval_ms=100, poll_interval_idle_ms=100)
    async with running(engine):
        await pass_s(5)
        assert engine.staleness_ms >= 5_000  # since the last fence
        await cluster.put(a=b"1")
        written_s = now_s()
        cluster.seal()
        await cluster.archive()
        await cluster.put(a=b"not archived")
        for _ in range(5):
            await pass_s(1)
            since_ms = 1_000 * (now_s() - written_s)
            assert since_ms <= engine.staleness_ms <= since_ms + 2_500


@virtual_time(seed=1)
async def test_bucket_proves_no_freshness_after_a_switch() -> None:
    """A replica that has not noticed a switch claims no freshness behind the closing fence."""
    cluster = await QuorumCluster.opened(is_quorum=False)
    engine = await cluster.join(
        poll_interval_ms=100, poll_interval_idle_ms=100, manifest_interval_ms=60_000
    )
    async with running(engine):
        await pass_s(5)
        assert engine.staleness_ms <= 100
        fenced_s = now_s()
        await cluster.switch()
        for safekeeper in cluster.safekeepers:
            safekeeper.node.stop()
        await cluster.put(a=b"1")
        for _ in range(20):
            await pass_s(0.1)
            assert engine.watermark.seq == 0
            assert engine.staleness_ms >= 1_000 * (now_s() - fenced_s)
        for safekeeper in cluster.safekeepers:
            safekeeper.node.start()
        await pass_s(5)
        assert engine.watermark.seq == 1


@virtual_time(seed=1)
async def test_records_too_large_for_the_buffer_are_archived() -> None:
    """A record too large for the buffer does not delay calls that wait for the archive."""
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(reader_memtable_bytes_max=MIB)
    async with running(engine):
        await steps(lambda: engine.is_pushed)
        await shown(engine, await cluster.put(a=bytes(MIB // 4)))
        assert engine.applier.unarchived.oldest_wal_id is None
        cluster.seal()
        await cluster.archive()
        await engine.archive()
        assert engine.applier.archived_wal_id in await cluster.wal()


READS_MAX = 20  # reads of the log until the feed serves a watch


@asynccontextmanager
async def watching(
    cluster: QuorumCluster, engine: ReplicaEngine, **fields: Any
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
    """A watch catches up after a few reads while commits keep coming, and gets each commit once."""
    cluster = await QuorumCluster.opened()
    engine = await cluster.join()
    async with running(engine):
        await steps(lambda: engine.is_pushed)
        puts = reads = 0
        held_object = engine.unarchived_object

        async def put() -> None:
            nonlocal puts
            seq = await cluster.put(a=b"%d" % puts)
            puts += 1
            await steps(lambda: engine.watermark.seq >= seq)

        async def held_while_commits_come(wal_id: int) -> Sst | None:
            nonlocal reads
            reads += 1
            await put()
            held = await held_object(wal_id)
            await put()
            return held

        monkeypatch.setattr(engine, "unarchived_object", held_while_commits_come)
        await put()
        fields = {"start_seq": 1, "previous_value": wants_previous}
        async with watching(cluster, engine, **fields) as client:
            await client.opened()
            while not engine.feed.subscriptions.count:
                await asyncio.sleep(0)
                assert reads <= READS_MAX
            await put()
            reported = [await client.commit() for _ in range(puts)]
        values = [commit.changes[0].entry.value for commit in reported]
        assert values == [b"%d" % number for number in range(puts)]
        if wants_previous:
            before = [commit.changes[0].previous.value for commit in reported]
            assert before == [b"", *values[:-1]]
