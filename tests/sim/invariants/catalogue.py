"""The invariants of server/docs/protocol.md by number, and the checkers of each.

A checker is a function ``check_i<number>_...`` under `checks`, which notes it here, and counts how
often it was called: so a test can see that there is one for each number, and that simulations call
it. What it finds is a `Violation` whose message begins with the number.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

INVARIANTS: Mapping[int, str] = {
    1: "An acknowledged write is in every later recovery. An unknown outcome is all or nothing, "
    "and never a part of a batch.",
    2: "Nothing that was deleted, overwritten or has expired comes back. Two writers in a row may "
    'differ by some seconds about when a value expires ("Logical time").',
    3: "A WAL slot has one winner; nothing is acknowledged behind a complete fence run of a higher "
    "epoch, whoever stalls and whatever is collected meanwhile.",
    4: "WAL ids have no gaps from the replay point on, nor before it but for those that a switch "
    "left out; slot order is sequence order.",
    5: "Manifest ids have no gaps; epochs, sequence numbers and logical time never go down; no "
    "number is issued twice.",
    6: "A replica shows prefixes of the writer's history and never goes back.",
    7: "A snapshot reads the same bytes until it expires, then a typed error.",
    8: "The collector deletes nothing that can still be reached.",
    9: "A compaction changes no answer; at most one result is published.",
    10: "Two-phase compare-and-swap has one winner, whatever crashes where.",
    11: "Quorum WAL: acknowledged means that a majority has it on disk; whatever minority is lost, "
    "an elected log holds it; only what was committed is archived.",
    12: "A flipped bit, a cut, a swapped or stale object is detected, never served.",
    13: "When faults stop, writes succeed again within bounded time; memory and L0 stay bounded "
    "throughout.",
    14: "Writes, conditions and `LINEARIZABLE` reads are linearizable; so are `COMMITTED` reads "
    "while nobody else has taken over.",
    15: "A retried request with its idempotency key applies once, across crashes and take-overs.",
}

# Profiles that run all of another one, and more: what is called there is called here.
WITHIN: Mapping[str, Sequence[str]] = {"database": ("two_phase", "quorum")}


@dataclass(frozen=True, slots=True)
class Checker:
    """A checker, and the profiles of the simulation in which it is called."""

    name: str
    number: int
    profiles: frozenset[str]
    text: str  # what it checks


CHECKERS: dict[str, Checker] = {}
calls: Counter[str] = Counter()  # of each checker, in this process


def checks(number: int, *profiles: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Note that a function checks an invariant, in runs of these profiles and of those `WITHIN`."""
    called_in = frozenset(profiles).union(*(WITHIN.get(each, ()) for each in profiles))

    def note(check: Callable[P, T]) -> Callable[P, T]:
        name = check.__name__
        if not name.startswith(f"check_i{number}_"):
            raise ValueError(f"{name} checks I{number}, and its name says something else")
        if name in CHECKERS:
            raise ValueError(f"there are two checkers {name}")
        CHECKERS[name] = Checker(name, number, called_in, check.__doc__ or "")

        @functools.wraps(check)
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            calls[name] += 1
            return check(*args, **kwargs)

        return counted

    return note


def uncalled(profile: str, before: Mapping[str, int]) -> list[str]:
    """The checkers of a profile that were not called since `calls` was `before`."""
    return [
        name
        for name, each in CHECKERS.items()
        if profile in each.profiles and calls[name] == before.get(name, 0)
    ]
