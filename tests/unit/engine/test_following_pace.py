"""When a replica looks, how old it says that it is, and what it does when its memory is full."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.engine.following import EMPTY_LOOKS
from shalekv.errors import StoreUnavailable
from tests.kit.engine.replica import (
    AskedStore,
    ReplicaGround,
    pass_s,
    running,
    scan,
)
from tests.kit.virtual_time import virtual_time

MIB = 1 << 20


@virtual_time(seed=1)
async def test_looks_are_paced_by_what_happens() -> None:
    """Every interval while something is written, then ever more seldom."""
    ground = await ReplicaGround.created()
    store = AskedStore(ground)
    settings = {"poll_interval_min_ms": 20, "poll_interval_idle_ms": 1_000}
    engine = await ground.join(store, poll_interval_ms=250, **settings)
    store.forget()
    following = asyncio.create_task(engine.follower.run())
    await pass_s(0.25 * EMPTY_LOOKS + 0.01)
    assert len(store.gets) == EMPTY_LOOKS + 1
    await pass_s(10)
    assert engine.follower.interval_ms == 1_000
    assert len(store.gets) <= EMPTY_LOOKS + 1 + 12
    await ground.put(a=b"1")
    await engine.catch_up()
    assert engine.follower.interval_ms == 250
    following.cancel()


@virtual_time(seed=1)
async def test_look_that_began_before_does_not_answer_who_asks_now() -> None:
    """What was written before the question is seen by the answer."""
    ground = await ReplicaGround.created()
    store = AskedStore(ground)
    engine = await ground.join(store)

    async def write_late(_: str) -> None:
        store.after_get = store.before_get
        await ground.put(a=b"1")
        asked.append(asyncio.create_task(engine.catch_up()))
        await pass_s(1)

    asked: list[asyncio.Task[None]] = []
    store.after_get = write_late
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    assert engine.prefix.seq == 0
    await asked[0]
    assert engine.prefix.seq == 1
    following.cancel()


@virtual_time(seed=1)
async def test_who_waits_for_a_commit_does_not_wait_for_an_idle_look() -> None:
    """An idle replica looks often again as soon as somebody waits for what is on its way."""
    ground = await ReplicaGround.created()
    engine = await ground.join(poll_interval_ms=250, poll_interval_idle_ms=60_000)
    following = asyncio.create_task(engine.follower.run())
    await pass_s(600)
    await engine.catch_up()
    waiting = asyncio.create_task(engine.prefix.cover(1))
    await pass_s(1)
    await ground.put(a=b"1")
    began_s = asyncio.get_running_loop().time()
    await waiting
    assert asyncio.get_running_loop().time() - began_s <= 0.25
    following.cancel()


@pytest.mark.parametrize("snapshot", ["own", "none"])
@virtual_time(seed=1)
async def test_full_memory_goes_on_when_more_is_compacted_than_it_holds(snapshot: str) -> None:
    """What there is no room for is in the levels some time: the log goes on behind them."""
    ground = await ReplicaGround.created()
    engine = await ground.join(
        snapshot=snapshot, reader_memtable_bytes_max=MIB, reader_parallel_reads=1
    )
    for number in range(8):
        await ground.put(**{f"k{number}": b"v" * (MIB // 4)})
    async with running(engine):
        await engine.catch_up()
        assert engine.follower.is_full
        applied = engine.prefix.seq
        assert applied < 8
        await pass_s(7)
        await engine.catch_up()
        assert engine.prefix.seq == applied
        assert engine.staleness_ms >= 7_000
        await ground.compact()
        await engine.catch_up()
        await engine.catch_up()
        assert engine.prefix.seq == 8
        assert not engine.follower.is_full
        assert engine.staleness_ms < 1_000
        assert len(await scan(engine)) == 8
        assert engine.memory_bytes < MIB // 2


@virtual_time(seed=1)
async def test_staleness_is_the_time_since_a_look_that_saw_the_end_began() -> None:
    """By lapsed time: an object that is applied makes nothing fresher, the end behind it does."""
    ground = await ReplicaGround.created()
    store = AskedStore(ground)
    engine = await ground.join(store)

    async def slow(_: str) -> None:
        await pass_s(3)

    assert engine.staleness_ms == 0
    await pass_s(5)
    assert engine.staleness_ms == 5_000
    store.before_get = slow
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    assert engine.staleness_ms == 3_000
    await ground.put(a=b"1")
    await engine.catch_up()
    assert engine.staleness_ms == 3_000  # the look at what came next
    following.cancel()


@virtual_time(seed=1)
async def test_store_that_does_not_answer_makes_the_state_grow_old() -> None:
    """Nobody who looks is told less than before, or hangs; it goes on when the store does."""
    ground = await ReplicaGround.created()
    store = AskedStore(ground)
    engine = await ground.join(store)

    async def away(name: str) -> None:
        raise StoreUnavailable(store.url, "get", name, "away")

    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    store.before_get = away
    since_s = asyncio.get_running_loop().time()
    await pass_s(4)
    await engine.catch_up()
    assert engine.follower.is_cut_off
    assert engine.staleness_ms / 1_000 >= asyncio.get_running_loop().time() - since_s >= 4
    store.before_get = store.after_get
    await engine.catch_up()
    assert not engine.follower.is_cut_off
    assert engine.staleness_ms == 0
    following.cancel()
