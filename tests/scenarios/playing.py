"""Plays a scenario: the shipped writer on a simulated store, in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings
from tests.scenarios import acts, expectations, tables
from tests.scenarios.reading import Scenario
from tests.scenarios.sentences import carry_out
from tests.scenarios.stage import Stage
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World

VOCABULARY = (acts, expectations, tables)  # importing them registers their sentences
LIMIT_S = 86_400.0  # of virtual time: a scenario that waits for what never happens fails


def play(scenario: Scenario, seed: int) -> None:
    """Play it on a new database; raises what shows that something else has happened.

    The seed orders what the scenario leaves open.
    """

    async def main(world: World) -> None:
        stage = Stage(world)
        creator = world.node("creator")
        store, runtime = world.store_for(creator), world.runtime_for(creator)
        await creator.run(create_database(store, runtime, StoreSettings()))
        stage.told_manifests = 1
        await carry_out(stage, scenario)

    # Whoever sends a request that is held waits for as long as it is held.
    faults = replace(Faults.none(), timeout_ms=math.inf)
    simulate(seed, main, faults=faults, limit_s=LIMIT_S)
