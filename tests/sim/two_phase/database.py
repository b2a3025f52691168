"""The whole database in the simulation, over a store without conditional writes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shalekv.engine.collection.collecting import Collecting
from shalekv.settings import CollectorSettings, StoreSettings
from shalekv.store.cas import CasStore
from tests.sim.levels import WholeRun, whole_database
from tests.sim.two_phase.judge import check_i10_nothing_is_left, check_i10_one_winner
from tests.sim.two_phase.store import TwoPhaseSimStore
from tests.sim.world import World

FOREIGN_AGE_S = 5
_OLDER_MS = 2_000.0 * FOREIGN_AGE_S  # after so long, all is older than what is collected
_COLLECTIONS = 2  # the first one leaves its own manifest behind


@dataclass(frozen=True, slots=True)
class TwoPhaseRun:
    """What took part in one run, the stores at its end, and what happened that matters."""

    whole: WholeRun
    store: TwoPhaseSimStore
    seen: Counter[str]


async def two_phase_database(world: World) -> TwoPhaseRun:
    """Run and check all that `whole_database` does, and two-phase compare-and-swap (I10).

    At the very end the power of all processes is cut, whatever they do, and all is collected.
    """
    random = world.random_for("two phases")
    store = TwoPhaseSimStore(world.loop, random, world.store.faults, world.runtime_for)
    world.store = store
    try:
        whole = await whole_database(world)
    finally:
        check_i10_one_winner(store.happened)  # the cause of what may have gone wrong above
    await _collect_all(world)
    seen = check_i10_one_winner(store.happened)
    check_i10_nothing_is_left(store)
    return TwoPhaseRun(whole, store, seen)


async def _collect_all(world: World) -> None:
    for node in world.nodes():
        node.crash()
    sweeper = world.node("sweeper")
    runtime, settings = world.runtime_for(sweeper), StoreSettings()
    collecting = Collecting(
        CasStore(world.store_for(sweeper), runtime, settings),
        CollectorSettings(collect_age_s=0, foreign_age_s=FOREIGN_AGE_S, wal_retention_s=0),
    )
    await world.sleep_ms(max(0.0, world.store.last_arrival_ms - world.now_ms))
    for _ in range(_COLLECTIONS):
        await world.sleep_ms(_OLDER_MS)
        await sweeper.run(collecting.collect())
