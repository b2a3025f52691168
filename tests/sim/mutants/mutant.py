"""A mutant: the shipped code with one plausible mistake, put there from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.sim.planting import Patch


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is replaced, and what is to notice it."""

    name: str
    breaks: str  # one sentence: what the code does wrong then
    patches: Sequence[Patch]
    profile: str  # of `tests.sim.profiles`
    invariants: tuple[str, ...]  # that it breaks, as protocol section 7 numbers them
    # How it shows besides: an invariant that falls with those, or what the shipped code raises when
    # it meets the damage (see `outcomes.kind_of`).
    also: tuple[str, ...] = ()
    seeds: int = 60  # so many may be tried
    hint: int = 0  # the first one: it is known to catch this, and saves time
    # One that runs of a whole database show too seldom is hunted by this smaller test instead.
    test: str = ""

    def is_seen_as(self, kind: str) -> bool:
        """Whether a failure of this kind is due to it."""
        return not {*self.invariants, *self.also}.isdisjoint(kind.split(", "))
