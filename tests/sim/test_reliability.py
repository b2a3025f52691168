"""RELIABILITY.md lists every checker, mutant and profile that exists, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.sim.campaign import PROFILES, WEIGHTS
from tests.sim.invariants.catalogue import CHECKERS, INVARIANTS
from tests.sim.mutants.registry import MUTANTS
from tests.sim.planting import rows

PAGE = (Path(__file__).parents[2] / "RELIABILITY.md").read_text()


def test_every_checker_is_on_the_page() -> None:
    """The table of promises names the checkers of each invariant."""
    promises = dict(re.findall(r"^\| I(\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    assert [*promises] == [str(number) for number in INVARIANTS]
    named = {number: set(re.findall(r"check_i\d+_\w+", row)) for number, row in promises.items()}
    assert named == {
        str(number): {each.name for each in CHECKERS.values() if each.number == number}
        for number in INVARIANTS
    }


def test_every_mutant_is_on_the_page() -> None:
    """The table of mutants has all of them, in their order, each with a sentence."""
    assert [*rows()] == [*MUTANTS]
    assert f"{len(MUTANTS)} mutants" in " ".join(PAGE.split())
    for mutant in MUTANTS.values():
        assert mutant.breaks.endswith("."), mutant
        assert set(mutant.invariants) <= {f"I{number}" for number in INVARIANTS}, mutant
        assert mutant.profile in PROFILES, mutant


def test_a_campaign_has_seeds_of_every_profile() -> None:
    """Every profile has its share of a campaign, and is described on the page."""
    assert set(WEIGHTS) == set(PROFILES)
    assert [name for name in PROFILES if f"`{name}`" not in PAGE] == []
