"""The judgement of a race by its outcomes, its bodies, and the object that was found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import Created, CreateOutcome, Exists, Unknown
from shalekv.store.two_phase.records import Inserted, InsertOutcome, InsertUnknown, Occupied
from shalekv.store.verify import two_phase
from shalekv.store.verify.races import race_problem

BODIES = (b"a", b"b", b"c")
LOST = Unknown("no answer")
PLACE = Destination("memory://tried", "verify/1")
A, B, C = (CreateRecord(PLACE, f"verify/1.{source}") for source in "abc")


@pytest.mark.parametrize(
    ("outcomes", "found"),
    [
        ((Exists(), Created(), Exists()), b"b"),
        ((LOST, Created(), Exists()), b"b"),
        ((LOST, Exists(), Exists()), b"a"),
        ((LOST, LOST, LOST), b"c"),
        ((LOST, LOST, LOST), None),
        ((None, LOST, Exists()), b"b"),
        ((None, None, None), None),
    ],
)
def test_a_fair_race(outcomes: Sequence[CreateOutcome | None], found: bytes | None) -> None:
    """A race with one winner, whose bytes are the object, is fair, even if the winner was not
    answered.
    """
    assert race_problem(outcomes, BODIES, found) == ""


@pytest.mark.parametrize(
    ("outcomes", "found", "problem"),
    [
        ((Created(), Created(), Exists()), b"b", "2 of 3"),
        ((Created(), Exists(), Exists()), b"b", "that of another"),
        ((Created(), LOST, LOST), b"b", "that of another"),
        ((Exists(), Exists(), Exists()), b"b", "reported to have lost"),
        ((LOST, Exists(), Exists()), b"b", "reported to have lost"),
        ((None, LOST, LOST), b"a", "reported to have lost"),
        ((Created(), Exists(), Exists()), b"else", "none of theirs"),
        ((Created(), Exists(), Exists()), None, "not there"),
        ((LOST, Exists(), LOST), None, "not there"),
    ],
)
def test_an_unfair_race(
    outcomes: Sequence[CreateOutcome | None], found: bytes | None, problem: str
) -> None:
    """Two winners, no winner, and an object that is not the winner's have an error each."""
    assert problem in race_problem(outcomes, BODIES, found)


@pytest.mark.parametrize(
    ("outcomes", "found", "problem"),
    [
        ((Inserted(), Occupied(A), Occupied(A)), A, ""),
        ((Occupied(A), Occupied(A), Occupied(A)), A, ""),
        ((InsertUnknown("lost"), Occupied(A), InsertUnknown("lost")), A, ""),
        ((InsertUnknown("lost"), InsertUnknown("lost"), InsertUnknown("lost")), None, ""),
        ((Inserted(), Inserted(), Occupied(A)), A, "2 of 3"),
        ((Inserted(), Occupied(A), Occupied(A)), B, "that of another"),
        ((InsertUnknown("lost"), Occupied(A), Occupied(C)), A, "that of another"),
        ((Inserted(), Occupied(A), Occupied(B)), A, "another record"),
        ((Inserted(), Occupied(A), Occupied(A)), None, "not there"),
    ],
)
def test_races_for_records(
    outcomes: Sequence[InsertOutcome], found: CreateRecord | None, problem: str
) -> None:
    """Records are judged as objects are; a process that finds its own record has won."""
    reported = two_phase.race_problem(outcomes, (A, B, C), found)
    assert (problem in reported) if problem else reported == ""
