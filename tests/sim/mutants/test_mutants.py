"""Mutants replace what is there, and only a failure by what one breaks counts as a catch."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.mutants.hunting import Survived, hunt
from tests.sim.mutants.registry import MUTANTS

LEAST = 93


def test_each_mutant_replaces_what_is_there() -> None:
    """None is dropped, and none patches a name that is gone."""
    assert len(MUTANTS) >= LEAST
    for mutant in MUTANTS.values():
        assert all(hasattr(owner, name) for owner, name, _ in mutant.patches), mutant


def test_a_failure_that_a_mutant_is_not_known_for_is_no_catch() -> None:
    """A failure of another kind is no catch: otherwise any crash would do."""
    mutant = replace(MUTANTS["ack before durable"], invariants=("I12",), seeds=2)
    survived = hunt(mutant)
    assert isinstance(survived, Survived)
    assert survived.beside
