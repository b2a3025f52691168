"""The scenario files of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.playing import play
from tests.scenarios.reading import Scenario, scenarios_in

SCENARIOS = scenarios_in(Path(__file__).parent)
ORDERS = 3


@pytest.mark.parametrize("scenario", SCENARIOS, ids=repr)
def test_scenario(scenario: Scenario) -> None:
    """What a scenario says will happen happens, and in whatever order tasks run."""
    for seed in range(ORDERS):
        play(scenario, seed)
