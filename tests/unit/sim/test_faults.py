"""Faults do to requests what their description says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import StoreUnavailable
from shalekv.store.api import Created, CreateOutcome, ObjectStore, Unknown
from tests.sim.faults import Faults, Span
from tests.sim.run import simulate
from tests.sim.world import World

Main = Callable[[World], Coroutine[Any, Any, None]]

sleep_ms = LoopClock().sleep_ms

QUIET = Faults.none(round_trip_ms=20)
UNANSWERED = replace(QUIET, reset=0.0, timeout_ms=1_000)


async def names(store: ObjectStore, prefix: str, **options: str) -> list[str]:
    """The names that a list shows."""
    return [info.name async for info in store.list(prefix, **options)]


FAULTY: list[tuple[Faults, list[str], list[str]]] = [
    # how all requests are treated, what is there when the sender is told, and a day later
    (replace(UNANSWERED, lost_request=1.0), [], []),
    (replace(UNANSWERED, lost_reply=1.0), ["wal/1"], ["wal/1"]),
    (replace(UNANSWERED, late_request=1.0), [], ["wal/1"]),
    (replace(UNANSWERED, refused=1.0), [], []),
]


@pytest.mark.parametrize(("faults", "then", "later"), FAULTY)
def test_an_unanswered_create_is_unknown(faults: Faults, then: list[str], later: list[str]) -> None:
    """A create that gets no answer is `Unknown`, landed or not, now or later."""

    async def main(world: World) -> None:
        outcome = await create(world.store_for("a"), "wal/1")
        assert isinstance(outcome, Unknown)
        assert outcome.cause == ("503 slow down" if faults.refused else "no answer within 1000 ms")
        assert world.store.names("wal/") == then
        await sleep_ms(86_400_000)
        assert world.store.names("wal/") == later

    simulate(1, main, faults=faults)


READS: list[Callable[[ObjectStore], Awaitable[object]]] = [
    lambda store: store.get("wal/1"),
    lambda store: store.get_range("wal/1", 0, 1),
    lambda store: store.head("wal/1"),
    lambda store: names(store, "wal/"),
    lambda store: store.delete(["wal/1"]),
    lambda store: store.now_ms(),
]


@pytest.mark.parametrize("faults", [faults for faults, _, _ in FAULTY])
@pytest.mark.parametrize("read", READS)
def test_other_unanswered_requests_are_unavailable(
    faults: Faults, read: Callable[[ObjectStore], Awaitable[object]]
) -> None:
    """What is not a create raises `StoreUnavailable` when it gets no answer."""

    async def main(world: World) -> None:
        with pytest.raises(StoreUnavailable):
            await read(world.store_for("a"))

    simulate(1, main, faults=faults)


def test_a_connection_may_be_reset_while_the_request_is_under_way() -> None:
    """The sender may learn early that no answer will come, before or after the request lands."""
    landed: set[bool] = set()

    async def main(world: World) -> None:
        outcome = await create(world.store_for("a"), "wal/1")
        assert outcome == Unknown("connection reset")
        assert world.now_ms <= 20
        landed.add(bool(world.store.log))

    for seed in range(30):
        simulate(seed, main, faults=replace(UNANSWERED, lost_reply=1.0, reset=1.0))
    assert landed == {False, True}


def test_too_many_requests_are_refused() -> None:
    """Above its rate the store refuses, and serves again when the rate has fallen."""

    async def main(world: World) -> None:
        store = world.store_for("a")
        burst = await asyncio.gather(*(create(store, f"wal/{n}") for n in range(15)))
        assert burst.count(Created()) == 10
        assert burst.count(Unknown("503 slow down")) == 5
        await sleep_ms(500)
        assert await create(store, "wal/20") == Created()

    simulate(3, main, faults=replace(QUIET, throttle_per_s=10))


def test_slow_spells_come_and_go() -> None:
    """In a spell requests take longer by its factor, between spells they don't."""

    async def main(world: World) -> None:
        store = world.store_for("a")
        taken: set[float] = set()
        for _ in range(2_000):
            started_ms = world.now_ms
            await store.now_ms()
            taken.add(round(world.now_ms - started_ms, 3))
        assert taken == {20, 100}

    spells = Span(100, 1_000)
    faults = replace(QUIET, spell_every_ms=2_000, spell_ms=spells, spell_factor=5)
    simulate(1, main, faults=faults)


def test_faults_can_change_during_a_run() -> None:
    """A phase without faults can follow one with faults."""

    async def main(world: World) -> None:
        store = world.store_for("a")
        assert isinstance(await create(store, "wal/1"), Unknown)
        world.store.faults = Faults.none()
        assert await create(store, "wal/1") == Created()

    simulate(1, main, faults=replace(UNANSWERED, lost_request=1.0))


def test_swarms_differ_and_all_faults_happen() -> None:
    """Drawn faults differ between seeds; each kind is absent in some runs and present in others."""
    drawn: list[Faults] = []

    async def main(world: World) -> None:
        world.store.faults = Faults.swarm(world.rng)
        drawn.append(world.store.faults)
        await asyncio.gather(*(create(world.store_for("a"), f"wal/{n}") for n in range(20)))

    for seed in range(40):
        simulate(seed, main)
    for kind in ("lost_request", "lost_reply", "late_request", "refused"):
        values = [getattr(faults, kind) for faults in drawn]
        assert min(values) == 0 < max(values)


@pytest.mark.parametrize(
    "wrong", [lambda: Faults(lost_request=0.6, refused=0.6), lambda: Span(0, 1), lambda: Span(2, 1)]
)
def test_impossible_faults_are_refused(wrong: Callable[[], object]) -> None:
    """Probabilities above one and empty ranges are errors where they are written."""
    with pytest.raises(ValueError, match=r"more than 1|not a range"):
        wrong()


async def create(store: ObjectStore, name: str) -> CreateOutcome:
    """A create as a coroutine, for tasks."""
    return await store.create(name, b"data")
