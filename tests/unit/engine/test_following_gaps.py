"""Gaps in the log: waited for, told, and never taken for its end (I4)."""

from __future__ import annotations

import asyncio
from typing import Any

from shalekv.engine.following import NEVER_MS
from shalekv.engine.reader_engine import ReaderEngine
from shalekv.format import names
from tests.kit.engine.replica import (
    AskedStore,
    ReplicaGround,
    all_shown,
    pass_s,
)
from tests.kit.virtual_time import virtual_time


async def behind_a_gap(ground: ReplicaGround, **settings: Any) -> tuple[ReaderEngine, AskedStore]:
    """A replica of a writer of epoch 2 with four objects in flight, whose next one is missing."""
    await ground.take_over(k=4)
    await ground.put(a=b"1")
    store = AskedStore(ground)
    engine = await ground.join(store, **settings)
    ground.slot += 1
    await ground.put(c=b"3")
    return engine, store


@virtual_time(seed=1)
async def test_gap_is_waited_for_and_told() -> None:
    """What stands behind a gap is not shown, and may be acknowledged: the state grows old."""
    ground = await ReplicaGround.created()
    engine, store = await behind_a_gap(ground)
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    assert await all_shown(engine) == {b"a": b"1"}
    follower = engine.follower
    assert (follower.is_in_gap, follower.counts.gaps) == (True, 1)
    assert engine.staleness_ms == NEVER_MS  # it has never seen the end of the log
    await pass_s(2)
    store.forget()
    await engine.catch_up()
    assert (store.gets, store.lists) == ([names.wal_name(1)], [names.WAL_FOLDER])
    assert (follower.counts.gaps, follower.gap_ms) == (1, 2_000)
    following.cancel()


@virtual_time(seed=1)
async def test_gap_that_is_filled_is_behind_us_and_the_next_one_counts() -> None:
    """Two gaps are two, also when one look fills the first and finds the second."""
    ground = await ReplicaGround.created()
    await ground.take_over(k=4)
    engine = await ground.join()
    missing = ground.commit(a=b"1")
    ground.slot += 1
    await ground.put(b=b"2")
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    await pass_s(1)
    ground.slot += 1
    await ground.put(d=b"4")
    await ground.fill_with(0, ground.writer, missing)
    await engine.catch_up()
    follower = engine.follower
    assert await all_shown(engine) == {b"a": b"1", b"b": b"2"}
    assert (follower.is_in_gap, follower.counts.gaps, follower.counts.gap_ms) == (True, 2, 1e3)
    await pass_s(2)
    await engine.catch_up()
    assert (follower.counts.gaps, follower.gap_ms) == (2, 3_000)
    following.cancel()


@virtual_time(seed=1)
async def test_writer_that_is_not_known_yet_may_leave_gaps() -> None:
    """After an object of a newer epoch than the manifest that was seen, the log is listed."""
    ground = await ReplicaGround.created()
    await ground.put(a=b"1")
    store = AskedStore(ground)
    engine = await ground.join(store)
    await ground.take_over(k=4)
    await ground.put(b=b"2")
    ground.slot += 1
    await ground.put(d=b"4")
    await pass_s(1)
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    following.cancel()
    assert engine.manifest.current.max_parallel_writes == 1
    assert engine.follower.is_in_gap
    assert engine.staleness_ms == 1_000  # since it has joined


@virtual_time(seed=1)
async def test_gap_is_looked_at_often_also_after_a_quiet_time() -> None:
    """What is missing is on its way: an idle replica does not wait for its next idle look."""
    ground = await ReplicaGround.created()
    await ground.take_over(k=4)
    engine = await ground.join(poll_interval_ms=250, poll_interval_idle_ms=60_000)
    following = asyncio.create_task(engine.follower.run())
    await pass_s(600)
    missing = ground.commit(a=b"1")
    ground.slot += 1
    await ground.put(b=b"2")
    await engine.catch_up()
    await ground.fill_with(0, ground.writer, missing)
    await pass_s(0.26)
    assert engine.prefix.seq == 2
    following.cancel()
