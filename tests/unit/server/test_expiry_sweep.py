"""Sweeps: the expiry of a value becomes exactly one change."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.errors import OutcomeUnknown, StoreBroken
from shalekv.v1 import kv_pb2
from tests.kit.constants import set_constants
from tests.kit.cycles import cycles_of
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import (
    POLL_HOURLY,
    Serving,
    delete_range,
    follow,
    forgotten,
    opened,
    pairs,
    serving,
)
from tests.kit.serving.sweeping import BY_HAND, TTL_MS, check_log, compact, expiries, logged
from tests.kit.states import counter
from tests.kit.virtual_time import virtual_time, with_simulation
from tests.sim.simulation import Simulation

SECOND_MS = 1_000


async def sweep(writer: Serving) -> None:
    await writer.engine.expiry.sweep()
    await writer.engine.expiry.scan()


@virtual_time(seed=1)
async def test_expired_value_is_swept_once() -> None:
    """An expired value becomes one change, not before its time; reads do not change."""
    database = await Database.created()
    async with serving(database, **BY_HAND) as writer:
        now_ms = writer.engine.time.now_ms()
        await writer.put(b"a", ttl_ms=TTL_MS)
        await writer.put(b"b")
        writer.pass_ms(TTL_MS - 1)
        await sweep(writer)
        assert await expiries(database) == []
        assert (await writer.get(b"a")).found
        writer.pass_ms(1 + SECOND_MS)
        before = [await writer.get(b"a"), pairs(await writer.scan())]
        for _ in range(3):
            await sweep(writer)
        assert await expiries(database) == [(b"a", now_ms + TTL_MS)]
        assert before[1] == pairs(await writer.scan()) == [(b"b", b"v")]
        assert not (await writer.get(b"a")).found
        assert writer.engine.expiry.expired_count == 1
        check_log(await logged(database))


@virtual_time(seed=1)
async def test_replaced_values_are_not_swept() -> None:
    """A value that was deleted, overwritten or given another ttl before it expired is not swept."""
    database = await Database.created()
    async with serving(database, **BY_HAND) as writer:
        for key in (b"deleted", b"in range", b"overwritten", b"renewed", b"counted"):
            await writer.put(key, counter(1), ttl_ms=TTL_MS)
        await writer.delete(b"deleted")
        await writer.ask(kv_pb2.WriteRequest(changes=[delete_range(prefix=b"in")]))
        await writer.put(b"overwritten")
        await writer.put(b"renewed", ttl_ms=3 * TTL_MS)
        writer.pass_ms(TTL_MS + SECOND_MS)
        await sweep(writer)
        assert [key for key, _ in await expiries(database)] == [b"counted"]
        writer.pass_ms(2 * TTL_MS)
        await sweep(writer)
        assert [key for key, _ in await expiries(database)] == [b"counted", b"renewed"]
        check_log(await logged(database))


@virtual_time(seed=1)
async def test_write_that_comes_first_is_not_taken_away() -> None:
    """A sweep is decided in the order of all writes, including those that are not durable yet."""
    database = await Database.created()
    async with serving(database, **BY_HAND) as writer:
        await writer.put(b"a", ttl_ms=TTL_MS)
        await writer.put(b"b", ttl_ms=TTL_MS)
        writer.pass_ms(TTL_MS + SECOND_MS)
        writer.store.is_holding = True
        put_again = asyncio.ensure_future(writer.put(b"a", b"new"))
        await writer.store.arrived(1)
        sweeping = asyncio.ensure_future(writer.engine.expiry.sweep())
        await quiesce()
        assert not sweeping.done()
        writer.store.release_all()
        await asyncio.gather(put_again, sweeping)
        assert pairs(await writer.scan()) == [(b"a", b"new")]
        assert [key for key, _ in await expiries(database)] == [b"b"]


@virtual_time(seed=1)
async def test_delete_that_lands_ahead_of_its_turn_counts() -> None:
    """A value that lands after its delete is not tracked, and never swept."""
    database = await Database.created()
    async with serving(database, **BY_HAND, max_parallel_writes=2) as writer:
        writer.store.is_holding = True
        putting = asyncio.ensure_future(writer.put(b"a", ttl_ms=TTL_MS))
        first = await writer.store.arrived(1)
        deleting = asyncio.ensure_future(writer.delete(b"a"))
        (await writer.store.arrived(2)).release()
        await deleting
        first.release()
        await putting
        writer.store.release_all()
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        writer.pass_ms(TTL_MS + SECOND_MS)
        await sweep(writer)
        assert await expiries(database) == []


@virtual_time(seed=1)
async def test_range_delete_that_was_compacted_is_not_forgotten() -> None:
    """A key that a compacted range delete has deleted is not swept."""
    database = await Database.created()
    async with serving(database, **BY_HAND) as writer:
        for key in (b"a1", b"a2", b"b1"):
            await writer.put(key, ttl_ms=TTL_MS)
        await writer.ask(kv_pb2.WriteRequest(changes=[delete_range(prefix=b"a")]))
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        writer.pass_ms(TTL_MS + SECOND_MS)
        await sweep(writer)
        assert [key for key, _ in await expiries(database)] == [b"b1"]


@virtual_time(seed=1)
async def test_untracked_values_are_found_in_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """If more values expire than are tracked, the levels are read, and only then."""
    database = await Database.created()
    set_constants(monkeypatch, {"shalekv.write.expiry_sweep:EXPIRY_TRACKED_BYTES_MAX": 2_000})
    async with serving(database, **BY_HAND) as writer:
        expected = {b"%02d" % number for number in range(20)}
        for key in expected:
            await writer.put(key, ttl_ms=TTL_MS)
        await compact(database)
        await follow(writer)
        before = writer.engine.levels.ssts.counters
        await sweep(writer)
        assert writer.engine.levels.ssts.counters == before
        writer.pass_ms(TTL_MS + SECOND_MS)
        await writer.engine.expiry.sweep()
        assert 0 < len(await expiries(database)) < 6
        await writer.engine.expiry.scan()
        assert sorted(key for key, _ in await expiries(database)) == sorted(expected)


@virtual_time(seed=1)
async def test_compactions_leave_what_has_expired_to_the_writer_for_a_while() -> None:
    """Merges keep an expired value for `expired_value_kept_s`, so that it can be swept."""
    for kept_s, expected in ((3_600, [b"a"]), (0, [])):
        database = await Database.created()
        async with serving(database, **BY_HAND) as writer:
            await writer.put(b"a", ttl_ms=TTL_MS)
            writer.pass_ms(TTL_MS + SECOND_MS)
            for key in (b"b", b"c"):
                await writer.put(key)
                await compact(database, expired_value_kept_s=kept_s)
        async with serving(database, **BY_HAND) as writer:
            await sweep(writer)
            assert [key for key, _ in await expiries(database)] == expected


@with_simulation(seed=1)
async def test_writer_sweeps_by_itself_and_is_silent_when_nothing_expires(sim: Simulation) -> None:
    """A value is swept within seconds of its expiry; without one no request is sent."""
    database = await Database.created()
    async with serving(database, **POLL_HOURLY) as writer:
        await writer.put(b"a", ttl_ms=TTL_MS)
        objects = len(await database.wal())
        await sim.sleep_ms(60_000)
        assert len(await database.wal()) == objects
        writer.pass_ms(TTL_MS + SECOND_MS)
        await sim.sleep_ms(1_100)
        assert [key for key, _ in await expiries(database)] == [b"a"]
        await sim.sleep_ms(60_000)
        assert len(await database.wal()) == objects + 1


@virtual_time(seed=1)
async def test_a_sweep_whose_writer_ends_leaves_no_cycle() -> None:
    """The error of a sweep whose writer ends is freed at once, as that of a refused call."""
    writer = await opened(**BY_HAND)
    running = asyncio.create_task(writer.run())
    await writer.put(b"a", ttl_ms=TTL_MS)
    writer.pass_ms(TTL_MS + SECOND_MS)
    writer.faulty.fail("create", error=StoreBroken("memory://", "create", "wal/", "the disk broke"))
    ends: list[type[BaseException]] = []

    async def sweep_in_vain() -> None:
        for coroutine in (writer.engine.expiry.sweep(), running):
            try:
                await coroutine
            except (OutcomeUnknown, StoreBroken) as error:
                ends.append(type(error))

    assert "OutcomeUnknown" not in await cycles_of(sweep_in_vain)
    assert ends == [OutcomeUnknown, StoreBroken]
