"""What a check of a store is, and what it comes to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shalekv.store.verify.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Passed:
    """The store keeps it."""

    seen: str = ""  # how much was looked at, where that is not plain


@dataclass(frozen=True, slots=True)
class Told:
    """The store does not keep it, and that is allowed."""

    remark: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The store does not keep it, and must."""

    problem: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The store did not answer, or refused: whether it keeps it is not known."""

    problem: str


Verdict = Passed | Told | Failed | Unanswered


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a store must keep.

    `run` works below the scratch folder, and raises `NotKept` or the errors of the store.
    """

    name: str
    proves: str
    lost: str  # the guarantee of the database that rests on it
    run: Callable[[Scratch], Awaitable[Passed | Told]]
