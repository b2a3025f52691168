"""The scenario files of this folder, and that each of them needs the rule that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.quorum import acts, openings
from tests.scenarios.quorum.openings import play
from tests.scenarios.reading import Scenario, parse, scenarios_in
from tests.sim.planting import planted
from tests.sim.quorum.bugs import RULES, UNNUMBERED, Bug

VOCABULARY = (acts, openings)  # importing them registers their sentences
SCENARIOS = scenarios_in(Path(__file__).parent)
BUGS = {**RULES, **UNNUMBERED}

# Rules without a number, and the file that is about them.
FILES = {
    "only the present members decide during a change": "members",
    "a change ends before the next members are filled": "members",
    "a leader ends another change than its own": "members",
    "a damaged log votes": "refilling",
    "a refilled member is sound at once": "refilling",
    "a late member gets an old log": "refilling",
}


def scenarios_about(rule: str) -> list[Scenario]:
    number = rule.split(maxsplit=1)[0].removeprefix("CE")
    start = FILES.get(rule) or f"ce{int(number):02}_"
    return [scenario for scenario in SCENARIOS if scenario.file.startswith(start)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=repr)
def test_scenario(scenario: Scenario) -> None:
    """Each scenario happens as written, and no invariant is broken on the way."""
    play(scenario)


@pytest.mark.parametrize("rule", BUGS)
def test_a_scenario_fails_without_its_rule(rule: str) -> None:
    """With the rule taken out, and nothing else, a scenario of its number does not come true."""
    assert [each for each in scenarios_about(rule) if fails(each, BUGS[rule])]


@pytest.mark.parametrize("number", range(1, 18))
def test_each_counterexample_has_its_scenario_and_its_bug(number: int) -> None:
    """CE1 to CE17 are complete."""
    assert [scenario for scenario in SCENARIOS if scenario.file.startswith(f"ce{number:02}_")]
    assert [rule for rule in RULES if rule.split()[0] == f"CE{number}"]


def test_unknown_sentences_are_refused() -> None:
    """A line that means nothing is an error, not a comment."""
    (scenario,) = parse("wrong.txt", "scenario: one\nwriter 1 sings")
    with pytest.raises(ValueError, match="0 meanings: writer 1 sings"):
        play(scenario)


def fails(scenario: Scenario, bug: Bug) -> bool:
    """Return whether the scenario notices the bug: by a sentence, or by an invariant."""
    with planted(bug()):
        try:
            play(scenario)
        except AssertionError:
            return True
        except pytest.fail.Exception:  # an error that a sentence names was not raised
            return True
    return False
