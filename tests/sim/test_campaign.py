"""The campaign of `make test`: new seeds of every profile for a time, and some mutants.

Everything runs in the same processes, as many as there are cores, for `BUDGET_S` seconds
(SIM_SECONDS=N: another time). The seed of the run decides which seeds and which tenth of the
mutants; TEST_SEED=N repeats a run, and a failure prints the command for its seed alone.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from tests.kit.seeds import random_of, run_seed
from tests.sim.campaign import (
    SHARES,
    WEIGHTS,
    Outcome,
    Tally,
    TimeBox,
    one_of_each_kind,
    run_task,
    shared,
    spread,
    total_of,
)
from tests.sim.mutants.hunting import Caught, Hunted, Survived, hunt_named
from tests.sim.mutants.registry import MUTANTS
from tests.sim.reporting import Progress, explain, table

BUDGET_S = float(os.environ.get("SIM_SECONDS", "158"))
TENTH = math.ceil(len(MUTANTS) / 10)
HUNTED = sorted(random_of("mutants").sample(sorted(MUTANTS), TENTH))


@dataclass(slots=True)
class Results:
    """Results of all runs."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    hunts: dict[str, Hunted] = field(default_factory=dict)


def call(job: Callable[[], object]) -> object:
    return job()


@pytest.fixture(scope="module")
def results() -> Results:
    """Run everything; what takes a fixed time first, then seeds until the budget is spent."""
    began_s = time.monotonic()
    results = Results()
    progress = Progress(results.tallies, print)
    box = TimeBox(BUDGET_S, random_of("campaign"), results.tallies)

    def jobs() -> Iterator[Callable[[], object]]:
        yield from (partial(hunt_named, name) for name in HUNTED)
        yield from (partial(run_task, task) for task in box.tasks())

    for result in spread(call, jobs(), ahead=2):
        match result:
            case Outcome():
                results.tallies.setdefault(result.task.profile, Tally()).add(result)
                progress.see(result)
            case (str(name), (Caught() | Survived()) as hunted):
                results.hunts[name] = hunted
    names = " ".join(f'"{name}"' for name in HUNTED)
    sys.stdout.write(
        f"\nseed of the run: {run_seed()}\n{table(results.tallies)}\n"
        f"mutants: .venv/bin/python -m tests.sim mutants {names}\n"
        f"{time.monotonic() - began_s:.0f} s of {BUDGET_S:.0f} s\n"
    )
    return results


@pytest.mark.timeout(3_600)
def test_new_seeds_break_no_invariant(results: Results) -> None:
    """Every profile keeps every invariant under crashes, stalls, losses, delays and partitions;
    when those stop, it serves.
    """
    failures = total_of(results.tallies.values()).failures
    assert not failures, "\n\n".join(explain(each) for each in one_of_each_kind(failures))
    assert {name for name, tally in results.tallies.items() if tally.seeds} == set(WEIGHTS)


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", HUNTED)
def test_a_mutant_is_caught(name: str, results: Results) -> None:
    """Some seed fails with it, by what it breaks, and does not fail without it."""
    hunted = results.hunts[name]
    assert isinstance(hunted, Caught), f"{name} survives: {hunted}"
    assert not hunted.without, f"seed {hunted.seed} fails without it, too: {hunted.without}"


@pytest.mark.timeout(1_200)
def test_a_seed_is_one_run_in_every_process() -> None:
    """Equal tasks have equal traces in processes whose hashes and addresses differ.

    Safekeepers were woken in the order of their addresses once: any seed of `quorum` has shown it.
    """
    first_seed = random_of("repeated").getrandbits(31)
    tasks = [*shared(dict.fromkeys(SHARES, 1), first_seed)]
    first, second = (
        {outcome.task: outcome.trace_hash for outcome in spread(run_task, tasks)} for _ in range(2)
    )
    assert first == second
    assert len(first) == len(SHARES)
