"""Many processes at once, crashes, lost and late requests, copies that land late: still one winner.

What a seed does is the same each time: the name of a failing test says how to repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from shalekv.errors import StoreUnavailable
from shalekv.format.names import parse_temporary_name, wal_name
from shalekv.store.claim import Claimed, ClaimOutcome, Taken, claim
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.unit.store.two_phase.collection import collect
from tests.unit.store.two_phase.world import Fate, Fates, Process, World

NAME = wal_name(7)
SEEDS = 60
RUNS = 40  # of one seed
STEPS_MAX = 400
CLAIMANTS = 3
LOST = (Fate.REQUEST_LOST, Fate.REPLY_LOST, Fate.LATE)

Work = Callable[[TwoPhaseStore], Coroutine[Any, Any, Any]]


def fates(random: Random, rate: float) -> Fates:
    """So many of all requests get no answer."""

    def fate(_request: str) -> Fate:
        return random.choice(LOST) if random.random() < rate else Fate.ANSWERED

    return fate


async def again_and_again(work: Work, store: TwoPhaseStore, times: int) -> None:
    """Do it so often, whatever the store says."""
    for _ in range(times):
        try:
            await work(store)
        except StoreUnavailable:
            continue


async def recover(store: TwoPhaseStore) -> None:
    """A process that opens the database."""
    await store.recover()


async def sweep(store: TwoPhaseStore) -> None:
    """A collector for which a temporary object is old as soon as it is there."""
    listed = [info.name async for info in store.list("wal/")]
    doomed = [name for name in listed if parse_temporary_name(name) is not None]
    if doomed:
        await store.delete(doomed)


async def wants(world: World, number: int, lossy: Fates) -> ClaimOutcome:
    """A process that claims the name until it knows who has it."""
    return await claim(world.open(lossy), NAME, written_by(number), runtime=world.runtime)


def written_by(number: int) -> bytes:
    """What this claimant writes."""
    return f"write id {number}".encode()


def explore(seed: str) -> None:
    """One run in an order that `seed` decides."""
    random = Random(seed)
    world = World(random=Random(seed))
    lossy = fates(random, random.choice((0.0, 0.05, 0.2)))
    crash_rate = random.choice((0.0, 0.0, 0.01, 0.03))
    late_rate = random.choice((0.0, 0.05, 0.1))
    same_again = random.choice((0.0, 0.6, 0.8, 0.9))  # some are far ahead, others stand still
    claimants = [Process(wants(world, number, lossy)) for number in range(CLAIMANTS)]
    janitors = [
        Process(again_and_again(work, world.open(lossy), 6)) for work in (sweep, sweep, recover)
    ]
    current = claimants[0]
    first: bytes | None = None
    for _ in range(STEPS_MAX):
        going = [process for process in (*claimants, *janitors) if not process.is_done]
        if not going:
            break
        choice = random.random()
        if world.late and choice < late_rate:
            world.catch_up(random)
        elif world.landings and choice < 2 * late_rate:
            world.land(random.choice(world.landings))
        elif choice > 1 - crash_rate:
            random.choice(going).crash()
        else:
            if current not in going or random.random() > same_again:
                current = random.choice(going)
            current.step()
        first = check_stays(world, first)
    for process in (*claimants, *janitors):
        process.crash()
    check_outcomes(world, claimants)
    Process(collect(world.open(), "wal/")).finish()
    first = check_stays(world, first)
    while world.landings:
        world.land(world.landings[0])
    while world.late:
        world.catch_up(random)
    first = check_stays(world, first)
    check_outcomes(world, claimants)
    check_the_end(world, first)


def check_stays(world: World, first: bytes | None) -> bytes | None:
    """An object that is there stays as it is."""
    data = world.data(NAME)
    assert first is None or data == first, f"{first!r} became {data!r}"
    return data


def check_outcomes(world: World, claimants: list[Process]) -> None:
    """One claimant at most has the name, and it and all others know what is there."""
    data = world.data(NAME)
    told = [process.result for process in claimants]
    assert told.count(Claimed()) <= 1
    for number, outcome in enumerate(told):
        if outcome == Claimed():
            assert data == written_by(number)
        elif isinstance(outcome, Taken):
            assert data == outcome.data != written_by(number)


def check_the_end(world: World, first: bytes | None) -> None:
    """Another claimant finds out who has it, and a collection leaves nothing but that."""
    outcome = Process(wants(world, CLAIMANTS, lambda _request: Fate.ANSWERED)).finish()
    assert outcome == (Claimed() if first is None else Taken(first))
    for _ in range(2):
        Process(collect(world.open(), "wal/")).finish()
    assert world.temporary("wal/") == []
    record = world.record(NAME)
    assert record is not None
    assert record.is_committed
    assert len(world.table) == 1
    check_stays(world, written_by(CLAIMANTS) if first is None else first)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_winner_whatever_happens(seed: int) -> None:
    """Three claimants, two collectors and a recovery agree on one object, which never changes."""
    for run in range(RUNS):
        explore(f"{seed}/{run}")
