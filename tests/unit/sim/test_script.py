"""Scripted faults hit the requests that they name, and no others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import StoreUnavailable
from shalekv.store.api import Created, CreateOutcome, Exists, Unknown
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.script import Match
from tests.sim.world import World

sleep_ms = LoopClock().sleep_ms

WAL_3 = "wal/00000000000000000003.sst"


async def create(world: World, node: str, name: str) -> CreateOutcome:
    """A create of `node`."""
    return await world.store_for(node).create(name, node.encode())


def test_the_reply_of_a_named_create_is_lost() -> None:
    """`lose_reply` hits the first matching request; its object is there, its sender isn't told."""

    async def main(world: World) -> None:
        world.store.lose_reply(Match("create", "wal/*3.sst", node="a"))
        assert await create(world, "a", "wal/1.sst") == Created()
        assert isinstance(await create(world, "a", WAL_3), Unknown)
        assert world.store.data(WAL_3) == b"a"
        assert await create(world, "a", WAL_3) == Exists()
        assert await create(world, "b", WAL_3) == Exists()

    simulate(1, main)


def test_the_nth_request_is_hit_and_as_many_as_asked_for() -> None:
    """`nth` leaves earlier requests alone, `times` bounds how many are hit, None hits all."""

    async def main(world: World) -> None:
        world.store.refuse(Match("create", node="a", nth=2), times=2)
        outcomes = [await create(world, "a", f"wal/{n}") for n in range(5)]
        hit = [isinstance(outcome, Unknown) for outcome in outcomes]
        assert hit == [False, True, True, False, False]
        world.store.lose_request(Match("head"), times=None)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await world.store_for("a").head("wal/0")

    simulate(1, main)


def test_a_held_create_is_applied_when_it_is_released() -> None:
    """A gate keeps a request at the store; another writer can win before it is released."""

    async def main(world: World) -> None:
        gate = world.store.hold(Match("create", "manifest/*", node="b"))
        async with asyncio.TaskGroup() as tasks:
            late = tasks.create_task(create(world, "b", "manifest/1"))
            await gate.reached()
            assert world.store.log == []
            assert await create(world, "a", "manifest/1") == Created()
            gate.release()
            assert await late == Exists()
        assert world.store.data("manifest/1") == b"a"

    simulate(1, main)


def test_a_held_create_lands_after_its_sender_gave_up_and_crashed() -> None:
    """A request that is held longer than the timeout is unknown to its sender, and still lands."""

    async def main(world: World) -> None:
        gate = world.store.hold(Match("create"))
        node = world.node("a")
        assert isinstance(await node.run(create(world, "a", "wal/1")), Unknown)
        node.crash()
        await sleep_ms(1_000_000)
        gate.release()
        assert world.store.data("wal/1") == b"a"

    simulate(1, main)


def test_a_held_request_is_waited_for_without_a_timeout() -> None:
    """With an infinite timeout the sender waits as long as the gate is closed."""

    async def main(world: World) -> None:
        gate = world.store.hold_reply(Match("create"))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(create(world, "a", "wal/1"))
            await gate.reached()
            assert world.store.data("wal/1") == b"a"
            await sleep_ms(1_000_000)
            assert not waiting.done()
            gate.release()
        assert waiting.result() == Created()

    simulate(1, main, faults=replace(Faults.none(), timeout_ms=float("inf")))


def test_dropped_requests_never_land() -> None:
    """What a gate drops is lost; a gate that was released lets later requests pass."""

    async def main(world: World) -> None:
        gate = world.store.hold(Match("create"), times=None)
        async with asyncio.TaskGroup() as tasks:
            lost = [tasks.create_task(create(world, "a", f"wal/{n}")) for n in range(2)]
            await gate.reached(2)
            gate.drop()
        assert all(isinstance(task.result(), Unknown) for task in lost)
        gate.release()
        assert await create(world, "a", "wal/9") == Created()
        assert world.store.names("wal/") == ["wal/9"]
        assert gate.arrived_count == 3

    simulate(1, main)


def test_a_late_request_lands_after_another_writer_took_over() -> None:
    """`delay` tells the sender nothing, and applies its request afterwards."""

    async def main(world: World) -> None:
        world.store.delay(Match("create", "wal/7", node="a"))
        assert isinstance(await create(world, "a", "wal/7"), Unknown)
        assert await create(world, "b", "wal/8") == Created()
        await sleep_ms(1_000_000)
        assert [(entry.node, entry.name) for entry in world.store.log] == [
            ("b", "wal/8"),
            ("a", "wal/7"),
        ]

    simulate(5, main)


def test_spared_requests_are_served() -> None:
    """`spare` keeps both drawn faults and later scripts away from what it matches."""

    async def main(world: World) -> None:
        world.store.spare(Match("create", "wal/*"), times=None)
        world.store.refuse(Match("create"), times=None)
        assert await create(world, "a", "wal/1") == Created()
        assert isinstance(await create(world, "a", "levels/1"), Unknown)

    simulate(1, main, faults=replace(Faults.none(), lost_reply=1.0))
