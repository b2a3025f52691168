"""What a failed attempt means for the next one. Pure: errors in, decisions out.

A client of one server has no choice but to ask it again, as `shalekv_client.retry` allows. With
several servers a call goes on at another one when that may help: a write at whoever is the writer
now, a read at any server that was not asked yet.
"""

from __future__ import annotations

import enum

from shalekv_client.errors import (
    Fenced,
    NotTheWriter,
    OutcomeUnknown,
    Overloaded,
    SeqNotReached,
    ShaleKVError,
    TooStale,
)
from shalekv_client.policies import Destination
from shalekv_client.retry import may_repeat


class Verdict(enum.Enum):
    """Where the next attempt goes."""

    FINAL = "nowhere"  # it would fail there as well, or could do harm
    SAME = "the same server"  # it will have room, or time, a little later
    OTHER = "another server"  # a write: after it was found out which one is the writer


def verdict(error: ShaleKVError, destination: Destination, *, is_repeatable: bool) -> Verdict:
    """What to do after an attempt at one of several servers has failed."""
    if isinstance(error, NotTheWriter | Fenced | TooStale | SeqNotReached):
        return Verdict.OTHER
    if destination is Destination.BY_POLICY:
        if isinstance(error, Overloaded):
            return Verdict.OTHER
        return Verdict.OTHER if may_repeat(error, is_repeatable=True) else Verdict.FINAL
    if not may_repeat(error, is_repeatable=is_repeatable):
        return Verdict.FINAL
    is_down = isinstance(error, OutcomeUnknown) or error.code == "UNAVAILABLE"
    return Verdict.OTHER if is_down else Verdict.SAME


def attempt_ms(left_ms: float, first_ms: float, number: int) -> float:
    """The time for an attempt, the `number`-th (from 1) of its kind.

    The first has `first_ms`, each further one twice as much: so a server that is slow, and not
    gone, is given enough time in the end.
    """
    return max(1.0, min(left_ms, first_ms * 2.0 ** min(number - 1, 16)))
