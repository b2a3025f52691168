"""The scenario files of this folder, played by the shipped writer on a simulated store."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings
from tests.scenarios import acts, expectations, tables
from tests.scenarios.reading import Scenario, scenarios_in
from tests.scenarios.sentences import play
from tests.scenarios.stage import Stage
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World

SCENARIOS = scenarios_in(Path(__file__).parent)
VOCABULARY = (acts, expectations, tables)  # importing them registers their sentences
SEEDS = 60  # each orders what a scenario leaves open in another way
DAY_S = 86_400.0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=repr)
def test_scenario(scenario: Scenario) -> None:
    """What a scenario says will happen happens, in whatever order tasks run."""

    async def main(world: World) -> None:
        stage = Stage(world)
        creator = world.node("creator")
        store, runtime = world.store_for(creator), world.runtime_for(creator)
        await creator.run(create_database(store, runtime, StoreSettings()))
        stage.told_manifests = 1
        await play(stage, scenario)

    # Whoever sends a request that is held waits for as long as it is held.
    faults = replace(Faults.none(), timeout_ms=math.inf)
    for seed in range(SEEDS):
        simulate(seed, main, faults=faults, limit_s=DAY_S)
