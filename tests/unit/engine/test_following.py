"""Following the log: which answers count, and what is never skipped (I4, I6)."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.engine.following import CORRUPT_LOOKS
from shalekv.errors import BadMagic
from shalekv.format import names
from tests.kit.engine.replica import (
    TTL_S,
    AskedStore,
    ReplicaGround,
    all_shown,
    get,
    pass_s,
    running,
)
from tests.kit.virtual_time import virtual_time


@virtual_time(seed=1)
async def test_what_is_there_is_applied_in_order_more_of_it_at_once() -> None:
    """One request for each object, twice as many at once each time, and one for the end."""
    ground = await ReplicaGround.created()
    store = AskedStore(ground)
    engine = await ground.join(store, reader_parallel_reads=4)
    for number in range(9):
        await ground.put(a=b"%d" % number)
    store.forget()
    async with running(engine):
        await engine.catch_up()
    assert (engine.prefix.seq, engine.prefix.wal_id) == (9, 8)
    assert sorted(store.gets) == [names.wal_name(n) for n in range(11)]  # 1 + 2 + 4 + 4
    assert store.gets[0] == names.wal_name(0)
    assert store.lists == []
    assert await get(engine, b"a") == b"8"
    assert engine.follower.counts.applied == 9


@pytest.mark.parametrize(
    ("snapshot", "is_sure", "lists"), [("own", True, 0), ("own", False, 1), ("none", False, 1)]
)
@virtual_time(seed=1)
async def test_answers_count_under_a_manifest_that_protects(
    *, snapshot: str, is_sure: bool, lists: int
) -> None:
    """A snapshot that may be over is looked for after each answer; a sure one costs nothing."""
    ground = await ReplicaGround.created()
    store = AskedStore(ground)
    engine = await ground.join(store, snapshot=snapshot, poll_interval_idle_ms=3_600_000)
    if not is_sure:
        await pass_s(TTL_S - 1.5)
    store.forget()
    running_follower = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    running_follower.cancel()
    assert store.gets == [names.wal_name(0)]
    assert store.lists == [names.MANIFEST_FOLDER] * lists
    assert engine.staleness_ms == 0


@pytest.mark.parametrize("snapshot", ["own", "none"])
@virtual_time(seed=1)
async def test_slot_that_was_collected_is_not_the_end_of_the_log(snapshot: str) -> None:
    """A replica that slept while its next slot was collected goes on behind the levels."""
    ground = await ReplicaGround.created()
    await ground.put(a=b"1")
    engine = await ground.join(snapshot=snapshot)
    for number in range(2, 5):
        await ground.put(a=b"%d" % number)
    await pass_s(TTL_S + 1)
    await ground.compact()
    await ground.collect()
    await ground.put(b=b"5")
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    following.cancel()
    assert await all_shown(engine) == {b"a": b"4", b"b": b"5"}
    assert (engine.prefix.seq, engine.prefix.wal_id) == (5, 4)
    assert engine.staleness_ms == 0
    assert engine.follower.counts.applied == 1


@pytest.mark.parametrize("damaged_looks", [CORRUPT_LOOKS - 1, CORRUPT_LOOKS])
@virtual_time(seed=1)
async def test_damaged_object_ends_the_reader_if_it_stays_so(damaged_looks: int) -> None:
    """What was damaged on its way is read again; what is damaged in the store is never skipped."""
    ground = await ReplicaGround.created()
    engine = await ground.join()
    await ground.put(a=b"1")
    name = names.wal_name(0)
    whole = ground.data(name)
    await ground.overwrite(name, b"X" * len(whole))
    running_engine = asyncio.create_task(engine.run())
    for _ in range(damaged_looks):
        await engine.follower.look()
    if damaged_looks == CORRUPT_LOOKS:
        with pytest.raises(BadMagic):
            await asyncio.wait_for(running_engine, TTL_S)
        with pytest.raises(BadMagic):
            engine.check_serving()
        return
    await ground.overwrite(name, whole)
    await engine.catch_up()
    assert await all_shown(engine) == {b"a": b"1"}
    engine.close()
    await running_engine
