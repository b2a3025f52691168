"""The simulated store without faults: requests travel, and land whatever their sender does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import InvalidRequest, ObjectNotFound
from shalekv.store.api import Created, CreateOutcome, Exists, ObjectInfo, ObjectStore, Unknown
from tests.sim.errors import SimulationError
from tests.sim.faults import Faults, Span
from tests.sim.objects import EPOCH_MS
from tests.sim.run import simulate
from tests.sim.script import Match
from tests.sim.world import World

Main = Callable[[World], Coroutine[Any, Any, None]]

sleep_ms = LoopClock().sleep_ms

QUIET = Faults.none(round_trip_ms=20)
UNANSWERED = replace(QUIET, reset=0.0, timeout_ms=1_000)


async def names(store: ObjectStore, prefix: str, **options: str) -> list[str]:
    """The names that a list shows."""
    return [info.name async for info in store.list(prefix, **options)]


def test_a_quiet_store_does_what_a_store_does() -> None:
    """Without faults each call takes one round trip and answers as the shipped memory store."""

    async def main(world: World) -> None:
        store = world.store_for("a")
        assert await store.create("wal/1", b"hello", {"k": "v"}) == Created()
        assert world.now_ms == 20
        assert await store.create("wal/1", b"other") == Exists()
        assert await store.create("wal/2", b"") == Created()
        stored = await store.get("wal/1")
        assert stored.info == ObjectInfo("wal/1", 5, EPOCH_MS + 10)
        assert (stored.data, dict(stored.metadata)) == (b"hello", {"k": "v"})
        assert await store.get_range("wal/1", -3, 2) == b"ll"
        assert await store.head("wal/2") == ObjectInfo("wal/2", 0, EPOCH_MS + 50)
        assert await names(store, "wal/") == ["wal/1", "wal/2"]
        assert await names(store, "wal/", start_after="wal/1") == ["wal/2"]
        assert await store.now_ms() == EPOCH_MS + 170
        await store.delete(["wal/1", "wal/9"])
        with pytest.raises(ObjectNotFound, match="wal/1"):
            await store.get("wal/1")
        with pytest.raises(InvalidRequest):
            await store.create("../escape", b"")
        await store.close()
        with pytest.raises(SimulationError, match="after closing"):
            await store.head("wal/2")

    simulate(1, main, faults=QUIET)


def test_the_log_tells_what_took_effect() -> None:
    """Creates that created and deletes that deleted are logged, with sender, time and bytes."""

    async def main(world: World) -> None:
        a, b = world.store_for("a"), world.store_for("b")
        await a.create("wal/1", b"from a")
        await b.create("wal/1", b"from b")
        await b.delete(["wal/1", "wal/2"])
        log = [(e.at_us, e.node, e.operation, e.name, e.data) for e in world.store.log]
        assert log == [
            (10_000, "a", "create", "wal/1", b"from a"),
            (50_000, "b", "delete", "wal/1", b""),
        ]
        assert world.store.names("wal/") == []
        assert world.store.data("wal/1") is None

    simulate(1, main, faults=QUIET)


def test_lists_come_in_pages() -> None:
    """A list is as many requests as it has pages, and sees what is created between them."""

    async def main(world: World) -> None:
        store = world.store_for("a")
        for number in range(5):
            await store.create(f"wal/{number}", b"")
        started_ms = world.now_ms
        seen: list[str] = []
        async for info in store.list("wal/"):
            seen.append(info.name)
            if info.name == "wal/1":
                await store.create("wal/11", b"")
        assert seen == ["wal/0", "wal/1", "wal/11", "wal/2", "wal/3", "wal/4"]
        assert world.now_ms - started_ms == 20 * 5  # four pages, the last one empty, one create

    simulate(1, main, faults=replace(QUIET, page_names=2))


def test_a_request_of_a_crashed_node_still_lands() -> None:
    """What was sent before the crash is applied after it."""

    async def main(world: World) -> None:
        node = world.node("a")
        node.start(create(world.store_for(node), "wal/1"))
        await sleep_ms(5)
        world.crash(node)
        assert world.store.names("wal/") == []
        await sleep_ms(100)
        assert world.store.names("wal/") == ["wal/1"]

    simulate(1, main, faults=QUIET)


def test_a_cancelled_create_still_lands() -> None:
    """Cancelling the call does not call the request back."""

    async def main(world: World) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await world.store_for("a").create("wal/1", b"")
        await sleep_ms(100)
        assert world.store.names("wal/") == ["wal/1"]

    simulate(1, main, faults=QUIET)


def test_a_paused_node_gets_its_reply_when_it_goes_on() -> None:
    """A reply to a paused node waits for it, and wins over the timeout that passed meanwhile."""

    async def main(world: World) -> None:
        node = world.node("a")
        outcome = node.spawn(create(world.store_for(node), "wal/1"))
        await sleep_ms(5)
        world.pause(node, 60_000)
        assert await outcome == Created()
        assert world.now_ms == 60_005

    simulate(1, main, faults=QUIET)


def test_reordered_requests_happen() -> None:
    """Of two requests that are sent at once, the second one may be applied, or answered, first."""
    applied: set[str] = set()
    answered: set[str] = set()

    async def main(world: World) -> None:
        done: list[str] = []

        async def one(name: str) -> None:
            await create(world.store_for("a"), name)
            done.append(name[-1])

        await asyncio.gather(one("wal/1"), one("wal/2"))
        answered.add("".join(done))
        applied.add("".join(entry.name[-1] for entry in world.store.log))

    span = Span(1, 100)
    for seed in range(30):
        simulate(seed, main, faults=replace(QUIET, request_ms=span, reply_ms=span))
    assert answered == applied == {"12", "21"}


def test_the_clock_of_the_store_is_its_own() -> None:
    """The store's clock starts at its epoch, follows true time, and jumps when it is told to."""

    async def main(world: World) -> None:
        store = world.store_for("a")
        assert await store.now_ms() == EPOCH_MS + 10
        world.store.jump_clock_ms(3_600_000)
        assert await store.now_ms() == EPOCH_MS + 3_600_030
        with pytest.raises(ValueError, match="does not go back"):
            world.store.jump_clock_ms(-1)

    simulate(1, main, faults=QUIET)


async def create(store: ObjectStore, name: str) -> CreateOutcome:
    """A create as a coroutine, for tasks."""
    return await store.create(name, b"data")


def test_a_near_node_is_quick_and_safe() -> None:
    """A near node has its own latency and no drawn faults, and waits while it is held."""

    async def main(world: World) -> None:
        world.store.place_near("a", 1.0)
        assert await world.node("a").run(create(world.store_for("a"), "wal/1")) == Created()
        assert world.now_ms == 2
        gate = world.store.hold(Match("create", node="a"))
        held = world.node("a").spawn(create(world.store_for("a"), "wal/2"))
        await sleep_ms(1_000_000)
        assert gate.arrived_count == 1
        gate.release()
        assert await held == Created()
        assert isinstance(await create(world.store_for("b"), "wal/3"), Unknown)

    simulate(1, main, faults=replace(QUIET, lost_request=1.0))


def test_the_store_knows_when_the_last_request_arrives() -> None:
    """After that moment nothing that was sent before changes anything."""

    async def main(world: World) -> None:
        world.store.delay(Match("create"))
        assert isinstance(await create(world.store_for("a"), "wal/1"), Unknown)
        assert world.now_ms < world.store.last_arrival_ms
        assert world.store.names("wal/") == []
        await sleep_ms(world.store.last_arrival_ms - world.now_ms)
        assert world.store.names("wal/") == ["wal/1"]

    simulate(1, main, faults=QUIET)
