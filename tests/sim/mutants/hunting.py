"""Hunting a mutant: it is planted, and seeds are run until one notices."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.sim.campaign import PROFILES, first_of, kind_of
from tests.sim.mutants.registry import MUTANTS
from tests.sim.planting import Mutant, failure, planted

ROOT = Path(__file__).parents[3]
# Required output of the test of a mutant: a failure for another reason is no catch.
SHOWN: Mapping[str, str] = {
    "list before manifest": r"> +again = await store\.arrived\(2\)",  # fences are not made again
    "a version newer than its snapshot": (
        r"assert held\.version\.manifest_id == snapshot\.manifest_id"
    ),
    "a result that counts is published again": r"SST [0-9a-f]+ is in the table already",
    "reads expire what a transaction has found": r"assert await shown\(writer, b.a.\)",
    "a replica goes backwards": r"await get\(engine, b.a.\)\) == \(2, b.2.\)",
}


@dataclass(frozen=True, slots=True)
class Caught:
    """This seed fails with the mutant."""

    seed: int
    error: str
    tried: int
    seconds: float
    without: str = ""  # how it fails without the mutant; empty: it does not, as it should be


@dataclass(frozen=True, slots=True)
class Survived:
    """No seed of the budget notices: the suite has a hole."""

    tried: int
    seconds: float
    beside: tuple[str, ...] = ()  # kinds of failures that it is not known for


Hunted: TypeAlias = Caught | Survived


def hunt(mutant: Mutant) -> Hunted:
    """Run seeds with the mutant, its hint first, until one fails as it should.

    Any other failure is no catch: the suite must detect what is wrong, not just that something is.
    Ends when the budget is spent. A mutant with a test of its own is hunted by that test.
    """
    if mutant.test:
        return _hunt_by_test(mutant)
    began_s = time.perf_counter()
    seeds = [mutant.hint, *(each for each in range(mutant.seeds) if each != mutant.hint)]
    main = PROFILES[mutant.profile]
    beside: list[str] = []
    for tried, seed in enumerate(seeds[: mutant.seeds], 1):
        with planted(mutant.patches):
            error = failure(seed, main)
        if error is None:
            continue
        kind = kind_of(error)
        if not mutant.is_seen_as(kind):
            beside.append(kind)
            continue
        seconds = time.perf_counter() - began_s
        without = failure(seed, main)
        return Caught(seed, _text(error), tried, seconds, _text(without) if without else "")
    return Survived(mutant.seeds, time.perf_counter() - began_s, tuple(beside))


def hunt_named(name: str) -> tuple[str, Hunted]:
    """The mutant's name, and how the hunt for it ended: for another process."""
    return name, hunt(MUTANTS[name])


def _hunt_by_test(mutant: Mutant) -> Hunted:
    """Hunt by a test, in processes of their own: it needs a loop, and a run of pytest, for itself.

    It must fail with the output in `SHOWN`.
    """
    began_s = time.perf_counter()
    ends = [
        subprocess.run(
            [sys.executable, "-m", "tests.sim.mutants.planted_test", *flags, mutant.name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for flags in ((), ("--without",))
    ]
    seconds = time.perf_counter() - began_s
    with_it, without = ends
    if with_it.returncode != pytest.ExitCode.TESTS_FAILED:
        return Survived(1, seconds)
    if not re.search(SHOWN[mutant.name], with_it.stdout):
        return Survived(1, seconds, beside=(with_it.stdout,))
    is_sound = without.returncode == pytest.ExitCode.OK
    return Caught(0, f"{mutant.test} fails", 1, seconds, "" if is_sound else without.stdout)


def _text(error: BaseException) -> str:
    first = first_of(error)
    return f"{type(first).__name__}: {first}"
