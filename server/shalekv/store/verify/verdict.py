"""What a check of a store is, and what it comes to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shalekv.store.verify.scratch import Scratch


@dataclass(frozen=True, slots=True)
class CheckPassed:
    """The store keeps it."""

    seen: str = ""  # how much was looked at, where that is not plain


@dataclass(frozen=True, slots=True)
class Told:
    """The store does not keep it, and that is allowed."""

    remark: str


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The store does not keep it, and must."""

    problem: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The store did not answer, or refused: whether it keeps it is not known."""

    problem: str


Verdict = CheckPassed | Told | CheckFailed | Unanswered


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a store must keep.

    `run` works below the scratch folder, and raises `NotKept` or the errors of the store.
    """

    name: str
    proves: str
    lost: str  # the guarantee of the database that rests on it
    run: Callable[[Scratch], Awaitable[CheckPassed | Told]]


# --- guarantees
# What a database guarantees, and what happens without it: told of a store that is unfit.
#
# Each begins with the guarantee and its number in docs/protocol.md.


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
