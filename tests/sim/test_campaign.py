"""The campaign: thousands of seeds, tens of thousands of crashes, and no violation."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from tests.sim.campaign import SHARES, one_of_each_kind, run_campaign, scaled, shared, spread
from tests.sim.mutants.registry import MUTANTS
from tests.sim.options import ALL, Options, Trouble
from tests.sim.outcomes import Outcome, Task, run_task
from tests.sim.planting import planted
from tests.sim.profiles import PROFILES
from tests.sim.shrinking import shrink
from tests.sim.telling import FOLDER, explain, replay_command, table, tell

SEEDS = 2_000
CRASHES_MIN = 20_000
PLANTED = "treat unknown as success"
SHORT = Options(chaos_steps=20)


@pytest.mark.timeout(1_800)
def test_many_seeds_break_no_invariant() -> None:
    """Writers, readers, compactors, collectors and safekeepers keep every invariant, whatever
    crashes, stands still, is lost, late, repeated or cut off; and when that stops, they serve.
    """
    tallies = run_campaign(shared(scaled(SHARES, SEEDS)))
    sys.stdout.write(f"\n{table(tallies)}\n")
    failures = [each for tally in tallies.values() for each in tally.failures]
    assert not failures, "\n\n".join(explain(each) for each in one_of_each_kind(failures))
    assert sum(tally.seeds for tally in tallies.values()) >= SEEDS
    assert sum(tally.befallen["crashes"] for tally in tallies.values()) >= CRASHES_MIN


@pytest.mark.parametrize("seeds", [4, 5, 30, 300, 500, SEEDS])
def test_a_campaign_has_as_many_seeds_as_are_asked_for(seeds: int) -> None:
    """Whatever is rounded, and each profile has some."""
    counts = scaled(SHARES, seeds)
    assert sum(counts.values()) == seeds
    assert min(counts.values()) > 0
    assert Counter(task.profile for task in shared(counts)) == counts


@pytest.mark.timeout(120)
def test_a_seed_is_one_run_in_every_process() -> None:
    """Equal tasks have equal traces in processes whose hashes and addresses differ."""
    tasks = [Task(profile, 5, SHORT) for profile in PROFILES]
    here = {task: run_task(task).trace_hash for task in tasks}
    there = {outcome.task: outcome.trace_hash for outcome in spread(run_task, tasks)}
    assert here == there


@pytest.mark.timeout(240)
def test_a_failure_is_shrunk_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a planted bug the smallest run is told, with its events and the command that replays it,
    and that command is about a run that does fail so.
    """
    monkeypatch.chdir(tmp_path)
    with planted(MUTANTS[PLANTED].patches):
        failed = next(o for o in map(run_task, shared({"writers": 60})) if o.has_failed)
        smallest = shrink(failed)
        assert smallest.kind == failed.kind
        # Whether it needs all of its chaos differs from one seed to the next.
        assert smallest.task.options.troubles < ALL.troubles
        assert run_task(smallest.task) == replace(smallest, cpu_s=ANY)
        told = tell(smallest)
    assert told.endswith(f"replay: {replay_command(smallest.task)}")
    assert smallest.problem in told
    (path,) = (tmp_path / FOLDER).iterdir()
    assert "epoch" in path.read_text() or "wal/" in path.read_text()


def test_a_command_replays_a_task() -> None:
    """What a failure is told to be replayed with names all that is left of it."""
    options = Options(7, 1, ALL.troubles - {Trouble.SCANS, Trouble.DISKS})
    command = replay_command(Task("database", 3, options))
    assert command.endswith(
        "replay database 3 --steps 7 --clients 1 --without disks --without scans"
    )


def test_the_smallest_options_that_fail_are_found() -> None:
    """Chaos ends where it must go on, and only the troubles and clients stay that are needed."""
    needed = {Trouble.PAUSES, Trouble.STORE}

    def run(options: Options) -> Outcome:
        fails = options.chaos_steps >= 13 and needed <= options.troubles and options.clients >= 2
        task = Task("writers", 0, options)
        return Outcome(task, "", 0.0, 0.0, 0, kind="I1" if fails else "")

    smallest = shrink(run(ALL), run).task.options
    assert smallest == Options(13, 2, frozenset(needed))
