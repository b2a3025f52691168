"""Plays a scenario: the shipped roles on a simulated store, in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings
from tests.scenarios import acts, jobs, objects, two_phase
from tests.scenarios.reading import Scenario
from tests.scenarios.sentences import carry_out
from tests.scenarios.stage import Stage
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World

VOCABULARY = (
    acts,
    jobs,
    objects,
    two_phase,
)  # importing them registers their sentences
NO_CONDITIONS, NO_DATABASE = "the store has no conditional writes", ", and no database yet"
LIMIT_S = 259_200.0  # of virtual time: a scenario that waits for what never happens fails


def play(scenario: Scenario, seed: int, *, limit_s: float = LIMIT_S) -> None:
    """Play it on a new database; raises what shows that something else has happened.

    The seed orders what the scenario leaves open. The first line may say of the store that it has
    no conditional writes, and that there is no database yet.
    """
    first = scenario.steps[0].text

    async def main(world: World) -> None:
        if first.startswith(NO_CONDITIONS):
            two_phase.install(world)
        stage = Stage(world)
        if not first.endswith(NO_DATABASE):
            creator = world.node("creator")
            store, runtime = world.store_for(creator), world.runtime_for(creator)
            await creator.run(create_database(store, runtime, StoreSettings()))
        stage.told_manifests = len(stage.attempts.of("manifest"))
        await carry_out(stage, scenario)

    # Whoever sends a request that is held waits for as long as it is held.
    faults = replace(Faults.none(), timeout_ms=math.inf)
    simulate(seed, main, faults=faults, limit_s=limit_s)
