"""Planting bugs into the shipped code, and seeing whether the simulation notices."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.sim.run import Main, simulate

# A module or class, a name in it, and what it becomes.
Patch: TypeAlias = tuple[object, str, object]

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Mutant:
    """The shipped code with one plausible mistake, and the checks that must notice it."""

    name: str
    breaks: str  # one sentence: what the code does wrong then
    patches: Sequence[Patch]
    profile: str  # name of a profile of `tests.sim.campaign`
    invariants: tuple[str, ...]  # invariants that it breaks, by their numbers in protocol section 7
    # How it shows besides: an invariant that falls with those, or what the shipped code raises when
    # it meets the damage (see `campaign.kind_of`).
    also: tuple[str, ...] = ()
    seeds: int = 60  # how many may be tried
    hint: int = 0  # the first one: it is known to catch this, and saves time
    # One that runs of a whole database show too seldom is hunted by this smaller test instead.
    test: str = ""

    def is_seen_as(self, kind: str) -> bool:
        return not {*self.invariants, *self.also}.isdisjoint(kind.split(", "))


@functools.cache
def rows() -> Mapping[str, tuple[str, str, tuple[str, ...]]]:
    """The table of mutants in RELIABILITY.md: what each breaks, its profile, its invariants."""
    page = (Path(__file__).parents[2] / "RELIABILITY.md").read_text()
    table = page.partition("\n## Mutants\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(.*)` \| (.*) \| `(.*)` \| (.*) \|$", table, re.MULTILINE)
    return {name: (breaks, of, tuple(broken.split(", "))) for name, breaks, of, broken in found}


def mutant(
    name: str,
    *patches: Patch,
    also: tuple[str, ...] = (),
    seeds: int = 60,
    hint: int = 0,
    test: str = "",
) -> Mutant:
    """The mutant that the table in RELIABILITY.md describes under this name."""
    return Mutant(name, rows()[name][0], patches, *rows()[name][1:], also, seeds, hint, test)


@contextmanager
def planted(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply these patches to the shipped code; revert them at the end, also after errors."""
    before: list[Patch] = []
    try:
        for owner, name, wrong in patches:
            # The entry of the class itself, not what an instance or a subclass would see.
            before.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, wrong)
        yield
    finally:
        for owner, name, was in reversed(before):
            if was is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, was)


def failure(seed: int, main: Main[object]) -> Exception | None:
    """The error with which the run with this seed fails; None: it does not."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            simulate(seed, main)
        except Exception as error:  # noqa: BLE001 - a violation, a deadlock, or whatever it led to
            return error
    return None
