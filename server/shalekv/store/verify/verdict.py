"""A check of a store, its verdict, and the guarantees of a database that rest on the checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shalekv.store.verify.scratch import Scratch


@dataclass(frozen=True, slots=True)
class CheckPassed:
    """The store fulfils the requirement."""

    seen: str = ""  # how much was checked, where that is not obvious


@dataclass(frozen=True, slots=True)
class NotOffered:
    """The store does not have an optional feature, which is reported."""

    remark: str


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The store violates the requirement."""

    problem: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The store did not answer, or refused: whether it fulfils the requirement is unknown."""

    problem: str


Verdict = CheckPassed | NotOffered | CheckFailed | Unanswered


@dataclass(frozen=True, slots=True)
class Check:
    """A requirement on a store, and the function that checks it.

    `run` uses the names of its `Scratch`, and raises `StoreViolation` or the errors of the store.
    """

    name: str
    proves: str  # the requirement
    lost: str  # the guarantee of the database that is lost without it
    run: Callable[[Scratch], Awaitable[CheckPassed | NotOffered]]


# Guarantees of a database, each with its number in server/docs/protocol.md and the consequence of
# its loss. They are shown when a store is unfit.
ONE_WINNER = (
    "one winner per slot of the log and per manifest (I3, I5): two writers would both believe that "
    "they won, and acknowledged writes would be lost"
)
DURABLE = "durability (I1): a recovery would miss acknowledged writes"
NO_GAP = "a log without gaps (I4): a writer that opens would miss acknowledged writes"
NOT_BACK = "deletion that lasts (I2): what was collected would be taken for present"
IN_ORDER = "one current manifest (I5): processes would go on with an older state of the database"
WHOLE = "bytes as they were written (I12): reads would fail as if the database were damaged"
TIMELY = "protection by snapshots and leases (I7, I8): what they name would be deleted too early"
