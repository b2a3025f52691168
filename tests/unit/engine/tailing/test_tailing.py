"""A replica of a quorum database: what it sees, and when, by a tail and by the bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shalekv.engine.reader_engine import ReaderEngine
from tests.kit.engine.replica import (
    AskedStore,
    all_shown,
    pass_s,
    running,
)
from tests.kit.virtual_time import virtual_time
from tests.unit.engine.tailing.ground import QuorumGround, shown, steps

MIB = 1 << 20


async def tailing(engine: ReaderEngine) -> None:
    """Wait until what is committed comes by itself."""
    await steps(lambda: engine.is_told)


@asynccontextmanager
async def tailed(**settings: int) -> AsyncIterator[tuple[QuorumGround, ReaderEngine]]:
    """A new database and a replica of it, to which what is committed comes by itself."""
    ground = await QuorumGround.opened()
    engine = await ground.replica(None, **settings)
    async with running(engine):
        await tailing(engine)
        yield ground, engine


def followed(ground: QuorumGround) -> int:
    """The number of the safekeeper whose tail is read."""
    (number,) = (at for at, keeper in enumerate(ground.keepers) if keeper.tails)
    return number


@virtual_time(seed=1)
async def test_tail_saves_the_polls_of_the_bucket() -> None:
    """While the tail works no WAL object is asked for; manifest and archive are, now and then."""
    ground = await QuorumGround.opened()
    store = AskedStore(ground)
    settings = {"poll_interval_ms": 250, "manifest_interval_ms": 10_000}
    engine = await ground.replica(store, **settings)
    async with running(engine):
        await tailing(engine)
        await engine.catch_up()
        store.forget()
        for number in range(60):
            seq = await ground.put(a=b"%d" % number)
            await shown(engine, seq)
            if number % 10 == 0:
                ground.seal()
                await steps(lambda: not engine.applying.position.is_open)
                await ground.archive(trims=True)
            await pass_s(1)
        assert engine.prefix.seq == ground.seq
        assert not [name for name in store.gets if name.startswith("wal/")]
        assert len(store.lists) <= 6 * 4  # a manifest, the archive, and the own snapshot
        assert ground.links.asked >= 60 * 4 * 2  # safekeepers are asked instead


@virtual_time(seed=1)
async def test_replica_without_safekeepers_sees_what_is_archived() -> None:
    """It falls back to the bucket, and goes on with a tail when one answers again."""
    async with tailed(poll_interval_ms=100, poll_interval_idle_ms=100) as (ground, engine):
        archived = await ground.put(a=b"1")
        ground.seal()
        seen = await ground.put(b=b"1")
        await steps(lambda: engine.prefix.seq == seen)
        for keeper in ground.keepers:
            keeper.is_up = False
            keeper.wake()
        last = await ground.put(c=b"1")
        await ground.archive()
        await pass_s(5)
        assert engine.prefix.seq == seen > archived
        assert not engine.is_told
        ground.seal()
        await ground.archive()
        await pass_s(1)
        assert engine.prefix.seq == last
        assert await all_shown(engine) == {b"a": b"1", b"b": b"1", b"c": b"1"}
        for keeper in ground.keepers:
            keeper.is_up = True
        newest = await ground.put(d=b"1")
        await pass_s(1)
        assert engine.is_told
        assert engine.prefix.seq == newest


@virtual_time(seed=1)
async def test_safekeeper_that_lags_is_left_for_a_fresher_one() -> None:
    """One that hears nothing of the writer is as good as none, however alive it is."""
    async with tailed(poll_interval_ms=250) as (ground, engine):
        first = followed(ground)
        ground.keepers[first].hears = False
        seq = await ground.put(a=b"1")
        await pass_s(1)
        assert engine.prefix.seq == seq
        assert followed(ground) != first


@pytest.mark.parametrize("trims", [False, True])
@virtual_time(seed=1)
async def test_object_of_which_a_part_was_applied_is_applied_once(*, trims: bool) -> None:
    """Read from the bucket later, it adds what came after that part, and nothing else."""
    async with tailed(poll_interval_ms=100) as (ground, engine):
        seen = await ground.put(a=b"1", b=b"1")
        await steps(lambda: engine.prefix.seq == seen)
        whole = engine.prefix.wal_id
        for keeper in ground.keepers:
            keeper.is_up = False
            keeper.wake()
        await ground.put(a=b"2")
        ground.seal()
        last = await ground.put(c=b"1")
        ground.seal()
        await ground.archive(trims=trims)
        await pass_s(2)
        assert engine.prefix.seq == last
        assert engine.prefix.wal_id == ground.leader.log.last.wal_id != whole
        assert await all_shown(engine) == {b"a": b"2", b"b": b"1", b"c": b"1"}
        assert engine.memtable.key_count == 3


@virtual_time(seed=1)
async def test_trimmed_records_are_read_from_the_bucket() -> None:
    """A replica that was away finds what the safekeepers have forgotten in the archive."""
    ground = await QuorumGround.opened()
    engine = await ground.replica(poll_interval_ms=100)
    for number in range(4):
        await ground.put(a=b"%d" % number)
        ground.seal()
    await ground.archive(trims=True)
    seq = await ground.put(b=b"1")
    async with running(engine):
        await pass_s(2)
        assert engine.prefix.seq == seq
        assert engine.is_told
        assert await all_shown(engine) == {b"a": b"3", b"b": b"1"}


@virtual_time(seed=1)
async def test_members_of_the_newest_manifest_are_tailed() -> None:
    """When all have been replaced, the new ones are found, and the old ones left."""
    async with tailed(poll_interval_ms=100, manifest_interval_ms=1_000) as (ground, engine):
        old = ground.keepers
        fresh = [type(old[0])(number) for number in (4, 5, 6)]
        await ground.set_members(fresh)
        seq = await ground.put(a=b"1")
        await pass_s(3)
        assert engine.prefix.seq == seq
        assert engine.is_told
        assert not any(keeper.tails for keeper in old)


@virtual_time(seed=1)
async def test_full_memory_stops_the_tail_until_there_is_room() -> None:
    """The bound holds, and what has no room is read when the levels hold what came before."""
    async with tailed(reader_memtable_bytes_max=MIB, poll_interval_ms=100) as (ground, engine):
        for number in range(8):
            await ground.put(**{f"k{number}": b"v" * (MIB // 4)})
            ground.seal()
            await ground.archive()
        await pass_s(1)
        assert engine.follower.is_full
        assert not engine.is_told
        assert engine.prefix.seq < ground.seq
        assert engine.memory_bytes < 2 * MIB
        await ground.compact()
        await pass_s(3)
        assert engine.prefix.seq == ground.seq
        assert engine.is_told
        assert len(await all_shown(engine)) == 8


@virtual_time(seed=1)
async def test_compaction_lets_go_of_what_came_by_a_tail() -> None:
    """What is in the levels leaves memory, also when the object that follows is open."""
    async with tailed(manifest_interval_ms=500) as (ground, engine):
        await ground.put(a=b"1")
        await ground.put(b=b"1")
        ground.seal()
        await ground.put(a=b"2")
        await ground.archive(trims=True)
        await ground.compact()
        await pass_s(2)
        assert engine.levels.current.tree.last_seq == ground.seq - 1
        assert await all_shown(engine) == {b"a": b"2", b"b": b"1"}
        assert engine.memtable.key_count <= 2
        assert engine.applying.unarchived.oldest_wal_id == ground.open_wal_id


@virtual_time(seed=1)
async def test_manifest_never_knows_of_objects_that_are_not_archived() -> None:
    """What a replica has seen in a tail alone is no object that somebody may look for."""
    async with tailed(manifest_interval_ms=500) as (ground, engine):
        await ground.put(a=b"1")
        ground.seal()
        await ground.archive()
        await ground.compact()
        for _ in range(3):
            await ground.put(a=b"2")
            ground.seal()
        await pass_s(30)
        assert engine.prefix.seq == ground.seq
        seen = (await ground.manifest()).wal_id_last_seen
        assert seen is not None
        assert seen <= max(await ground.wal())
