"""The simulation finds what it is there to find: each mutant of the shipped code is caught."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.sim.campaign import spread
from tests.sim.invariants.catalogue import INVARIANTS
from tests.sim.mutants.hunting import Caught, Hunted, Survived, hunt, hunt_named
from tests.sim.mutants.registry import MUTANTS
from tests.sim.outcomes import PROFILES

LEAST = 83
BY_NAME = (  # those that a suite without would not be worth its name
    "skip F1",
    "skip F2",
    "skip F3",
    "ack before durable",
    "fence with one SST when k are needed",
    "list before manifest",
    "<= for < in collection: leases",
    "<= for < in collection: snapshots",
    "<= for < in collection: slots",
    "forget the snapshot's expiry renewal",
    "drop a tombstone early",
    "resurrect on TTL",
    "treat unknown as failed",
    "treat unknown as success",
    "lose the last entry of a block",
    "ignore a checksum",
    "replay past a gap",
    "reuse a sequence number",
    "publish a compaction twice",
)


def test_the_mutants_that_matter_most_are_there() -> None:
    """Nobody has dropped one because it survived."""
    assert [name for name in BY_NAME if name not in MUTANTS] == []
    assert len(MUTANTS) >= LEAST


def test_each_mutant_says_what_it_breaks() -> None:
    """In a sentence, with invariants of the protocol, and it replaces what is there."""
    for mutant in MUTANTS.values():
        assert mutant.breaks.endswith("."), mutant
        assert mutant.invariants, mutant
        assert set(mutant.invariants) <= {f"I{number}" for number in INVARIANTS}, mutant
        assert mutant.profile in PROFILES, mutant
        assert all(hasattr(owner, name) for owner, name, _ in mutant.patches), mutant


@pytest.fixture(scope="module")
def hunts(request: pytest.FixtureRequest) -> Mapping[str, Hunted]:
    """How the hunts ended for all mutants that tests of this run ask for, in all cores."""
    names = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_a_mutant_is_caught.__name__
    ]
    hunted = dict(spread(hunt_named, names))
    for name, how in hunted.items():
        sys.stdout.write(f"{name}: {how}\n")
    return hunted


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, hunts: Mapping[str, Hunted]) -> None:
    """Some seed fails with it, by what it breaks, and does not fail without."""
    hunted = hunts[name]
    assert isinstance(hunted, Caught), f"{name} survives: {hunted}"
    assert not hunted.without, f"seed {hunted.seed} fails without it, too: {hunted.without}"


def test_a_failure_that_a_mutant_is_not_known_for_is_no_catch() -> None:
    """The suite is to see what is wrong: any crash would do otherwise."""
    mutant = replace(MUTANTS["ack before durable"], invariants=("I12",), seeds=2)
    survived = hunt(mutant)
    assert isinstance(survived, Survived)
    assert survived.beside
