"""Following the log: which answers are valid, gaps, and when a replica polls (I4, I6)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from shalekv.errors import BadMagic, ObjectNotFound
from shalekv.format import names
from shalekv.replica.follow import CORRUPT_POLLS
from shalekv.replica.progress import EMPTY_POLLS
from tests.kit.constants import constants
from tests.kit.engine.replica import (
    TTL_S,
    ReplicatedDatabase,
    all_shown,
    get,
    pass_s,
    running,
    scan,
)
from tests.kit.store import FOR_EVER, FaultyStore, at_each, nothing
from tests.kit.virtual_time import virtual_time


@virtual_time(seed=1)
async def test_objects_are_applied_in_order_in_growing_batches() -> None:
    """Each object takes one request, in batches that double, and one more finds the end."""
    database = await ReplicatedDatabase.created()
    store = FaultyStore(database.another_store())
    engine = await database.join(store)
    for number in range(9):
        await database.put(a=b"%d" % number)
    store.requests.clear()
    async with running(engine):
        with constants({"shalekv.replica.follow:PARALLEL_READS_MAX": 4}):
            await engine.catch_up()
    assert (engine.watermark.seq, engine.watermark.wal_id) == (9, 8)
    assert sorted(store.asked("get")) == [names.wal_name(n) for n in range(11)]  # 1 + 2 + 4 + 4
    assert store.asked("get")[0] == names.wal_name(0)
    assert store.asked("list") == []
    assert await get(engine, b"a") == b"8"
    assert engine.follower.counts.applied == 9


@pytest.mark.parametrize(
    ("snapshot", "is_sure", "lists"), [("own", True, 0), ("own", False, 1), ("none", False, 1)]
)
@virtual_time(seed=1)
async def test_answers_are_valid_under_a_protecting_manifest(
    *, snapshot: str, is_sure: bool, lists: int
) -> None:
    """A snapshot that may have expired is checked after each answer; a sure one costs nothing."""
    database = await ReplicatedDatabase.created()
    store = FaultyStore(database.another_store())
    engine = await database.join(store, snapshot=snapshot, poll_interval_idle_ms=3_600_000)
    if not is_sure:
        await pass_s(TTL_S - 1.5)
    store.requests.clear()
    running_follower = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    running_follower.cancel()
    assert store.asked("get") == [names.wal_name(0)]
    assert store.asked("list") == [names.MANIFEST_FOLDER] * lists
    assert engine.staleness_ms == 0


@pytest.mark.parametrize("snapshot", ["own", "none"])
@virtual_time(seed=1)
async def test_slot_that_was_collected_is_not_the_end_of_the_log(snapshot: str) -> None:
    """A replica whose next slot was collected while it paused continues behind the levels."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    engine = await database.join(snapshot=snapshot)
    for number in range(2, 5):
        await database.put(a=b"%d" % number)
    await pass_s(TTL_S + 1)
    await database.compact()
    await database.collect()
    await database.put(b=b"5")
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    following.cancel()
    assert await all_shown(engine) == {b"a": b"4", b"b": b"5"}
    assert (engine.watermark.seq, engine.watermark.wal_id) == (5, 4)
    assert engine.staleness_ms == 0
    assert engine.follower.counts.applied == 1


@pytest.mark.parametrize("damaged_polls", [CORRUPT_POLLS - 1, CORRUPT_POLLS])
@virtual_time(seed=1)
async def test_object_that_stays_damaged_ends_the_reader(damaged_polls: int) -> None:
    """An object that was damaged in transit is read again; a damaged one is never skipped."""
    database = await ReplicatedDatabase.created()
    engine = await database.join()
    await database.put(a=b"1")
    name = names.wal_name(0)
    whole = database.data(name)
    await database.overwrite(name, b"X" * len(whole))
    running_engine = asyncio.create_task(engine.run())
    for _ in range(damaged_polls):
        await engine.follower.polls.next()
    if damaged_polls == CORRUPT_POLLS:
        with pytest.raises(BadMagic):
            await asyncio.wait_for(running_engine, TTL_S)
        with pytest.raises(BadMagic):
            engine.check_serving()
        return
    await database.overwrite(name, whole)
    await engine.catch_up()
    assert await all_shown(engine) == {b"a": b"1"}
    engine.close()
    await running_engine


@virtual_time(seed=1)
async def test_gaps_are_counted_one_by_one() -> None:
    """Two gaps count as two, also when one poll fills the first and finds the second."""
    database = await ReplicatedDatabase.created()
    await database.take_over(k=4)
    engine = await database.join()
    missing = database.commit(a=b"1")
    database.slot += 1
    await database.put(b=b"2")
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    await pass_s(1)
    database.slot += 1
    await database.put(d=b"4")
    await database.fill_with(0, database.writer, missing)
    await engine.catch_up()
    gaps = engine.follower.gaps
    assert await all_shown(engine) == {b"a": b"1", b"b": b"2"}
    assert (gaps.is_open, gaps.count, gaps.total_ms) == (True, 2, 1e3)
    await pass_s(2)
    await engine.catch_up()
    assert (gaps.count, gaps.total_ms) == (2, 3_000)
    following.cancel()


@virtual_time(seed=1)
async def test_unknown_writer_may_leave_gaps() -> None:
    """After an object of an epoch newer than the known manifest, the log is listed for gaps."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    store = FaultyStore(database.another_store())
    engine = await database.join(store)
    await database.take_over(k=4)
    await database.put(b=b"2")
    database.slot += 1
    await database.put(d=b"4")
    await pass_s(1)
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    following.cancel()
    assert engine.manifest.current.max_parallel_writes == 1
    assert engine.follower.gaps.is_open
    assert engine.staleness_ms == 1_000  # since it has joined


MIB = 1 << 20


@virtual_time(seed=1)
async def test_polls_are_paced_by_activity() -> None:
    """Polls come every interval while something is written, then less and less often."""
    database = await ReplicatedDatabase.created()
    store = FaultyStore(database.another_store())
    settings = {"poll_interval_idle_ms": 1_000}
    engine = await database.join(store, poll_interval_ms=250, **settings)
    store.requests.clear()
    following = asyncio.create_task(engine.follower.run())
    await pass_s(0.25 * EMPTY_POLLS + 0.01)
    assert len(store.asked("get")) == EMPTY_POLLS + 1
    await pass_s(10)
    assert engine.follower.polls.interval_ms == 1_000
    assert len(store.asked("get")) <= EMPTY_POLLS + 1 + 12
    await database.put(a=b"1")
    await engine.catch_up()
    assert engine.follower.polls.interval_ms == 250
    following.cancel()


@virtual_time(seed=1)
async def test_earlier_poll_does_not_answer_a_later_call() -> None:
    """A call gets the answer of a poll that began after it, and so sees all earlier writes."""
    database = await ReplicatedDatabase.created()
    store = FaultyStore(database.another_store())
    engine = await database.join(store)

    async def answer_late() -> None:
        store.before = nothing
        await database.put(a=b"1")
        asked.append(asyncio.create_task(engine.catch_up()))
        await pass_s(1)
        raise ObjectNotFound(store.url, "get", names.wal_name(0), "as it was asked for")

    asked: list[asyncio.Task[None]] = []
    store.before = at_each("get", names.wal_name(0), answer_late)
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    assert engine.watermark.seq == 0
    await asked[0]
    assert engine.watermark.seq == 1
    following.cancel()


@virtual_time(seed=1)
async def test_waiting_for_a_commit_ends_idle_polling() -> None:
    """An idle replica polls frequently again as soon as a call waits for a later commit."""
    database = await ReplicatedDatabase.created()
    engine = await database.join(poll_interval_ms=250, poll_interval_idle_ms=60_000)
    following = asyncio.create_task(engine.follower.run())
    await pass_s(600)
    await engine.catch_up()
    waiting = asyncio.create_task(engine.watermark.wait_for(1))
    await pass_s(1)
    await database.put(a=b"1")
    began_s = asyncio.get_running_loop().time()
    await waiting
    assert asyncio.get_running_loop().time() - began_s <= 0.25
    following.cancel()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("snapshot", ["own", "none"])
@virtual_time(seed=1)
async def test_full_replica_continues_behind_the_levels(
    snapshot: str,
    is_late: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A full replica continues behind the levels once these hold what did not fit.

    This holds whether or not it was full before it began to serve.
    """
    database = await ReplicatedDatabase.created()

    async def fill() -> None:
        for number in range(8):
            await database.put(**{f"k{number}": b"v" * (MIB // 4)})

    if is_late:
        await fill()
    engine = await database.join(snapshot=snapshot, reader_memtable_bytes_max=MIB)
    if not is_late:
        await fill()
    assert engine.memory_bytes < MIB + MIB // 2
    async with running(engine):
        await engine.catch_up()
        assert engine.applier.memory.is_full
        applied = engine.watermark.seq
        assert applied < 8
        await pass_s(7)
        await engine.catch_up()
        assert engine.watermark.seq == applied
        assert engine.staleness_ms >= 7_000
        await database.compact()
        await engine.catch_up()
        await engine.catch_up()
        assert engine.watermark.seq == 8
        assert not engine.applier.memory.is_full
        assert engine.staleness_ms < 1_000
        assert len(await scan(engine)) == 8
        assert engine.memory_bytes < MIB // 2


@virtual_time(seed=1)
async def test_staleness_counts_from_the_poll_that_found_the_end() -> None:
    """Staleness counts from the poll that found the end of the log, not from an apply."""
    database = await ReplicatedDatabase.created()
    store = FaultyStore(database.another_store())
    engine = await database.join(store)
    assert engine.staleness_ms == 0
    await pass_s(5)
    assert engine.staleness_ms == 5_000
    store.before = at_each("get", "", partial(pass_s, 3))
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    assert engine.staleness_ms == 3_000
    await database.put(a=b"1")
    await engine.catch_up()
    assert engine.staleness_ms == 3_000  # the poll for what came next
    following.cancel()


@virtual_time(seed=1)
async def test_staleness_grows_while_the_store_does_not_answer() -> None:
    """While the store does not answer, polls end, nothing is taken back, and staleness grows."""
    database = await ReplicatedDatabase.created()
    store = FaultyStore(database.another_store())
    engine = await database.join(store)
    following = asyncio.create_task(engine.follower.run())
    await engine.catch_up()
    store.fail("get", times=FOR_EVER)
    since_s = asyncio.get_running_loop().time()
    await pass_s(4)
    await engine.catch_up()
    assert engine.follower.is_cut_off
    assert engine.staleness_ms / 1_000 >= asyncio.get_running_loop().time() - since_s >= 4
    store.before = nothing
    await engine.catch_up()
    assert not engine.follower.is_cut_off
    assert engine.staleness_ms == 0
    following.cancel()
