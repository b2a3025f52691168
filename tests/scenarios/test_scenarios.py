"""The scenario files of this folder; a scenario with a false statement fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.playing import play
from tests.scenarios.reading import Scenario, parse, scenarios_in
from tests.sim.errors import OutOfTime

SCENARIOS = scenarios_in(Path(__file__).parent)
ORDERS = 3
OPENED = "scenario: one\n\nwriter 1 opens\ncount time and slots from here\n"
UNTRUE = {
    "another outcome": "writer 1 puts a=1: Fenced",
    "another slot": """
        writer 1 puts a=1: acknowledged
        time 0, 00000000000000000001.sst, writer_epoch=1 // success
        """,
    "an attempt too few": """
        writer 1 puts a=1: acknowledged
        writer 1 puts b=2: acknowledged
        time 0, 00000000000000000000.sst, writer_epoch=1 // success
        """,
    "other contents": """
        writer 1 puts a=1: acknowledged
        00000000000000000000.sst, writer_epoch=1: a=2
        """,
    "other fields of a manifest": "manifest 1: writer_epoch=2",
    "an outcome that is left out": "writer 1 puts a=1",
    "a gate that nothing reaches": "hold writer 1's create of wal 7",
    "a fault that hits nothing": "lose the reply to writer 1's create of wal 7",
    "an object that goes": """
        writer 1 closes
        collector 1 collects
        manifest/00000000000000000000.manifest stays
        """,
    "other levels": """
        writer 1 puts a=1: acknowledged
        compactor 1 opens
        compactor 1 compacts
        levels/1.sst, level 0: a=2
        """,
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=repr)
def test_scenario(scenario: Scenario) -> None:
    """Each scenario happens as written, in whatever order tasks run."""
    for seed in range(ORDERS):
        play(scenario, seed)


@pytest.mark.parametrize("steps", UNTRUE.values(), ids=UNTRUE)
def test_untrue_scenarios_fail(steps: str) -> None:
    """A scenario with a false or a missing statement fails."""
    (scenario,) = parse("untrue.txt", OPENED + steps)
    with pytest.raises((AssertionError, OutOfTime)):
        play(scenario, 0, limit_s=3_600)


def test_unknown_sentences_are_refused() -> None:
    """A line without a meaning is an error that names its place."""
    (scenario,) = parse("wrong.txt", OPENED + "writer 1 sings")
    with pytest.raises(ValueError, match="0 meanings: writer 1 sings") as raised:
        play(scenario, 0)
    assert raised.value.__notes__ == ["tests/scenarios/wrong.txt:5: writer 1 sings"]
