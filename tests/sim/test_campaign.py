"""The campaign: thousands of seeds, tens of thousands of crashes, and no violation."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from tests.sim.campaign import (
    SHARES,
    Tally,
    one_of_each_kind,
    run_campaign,
    scaled,
    shared,
    spread,
)
from tests.sim.errors import Violation
from tests.sim.mutants.registry import MUTANTS
from tests.sim.options import ALL, Options, Trouble
from tests.sim.outcomes import Outcome, Task, run_task
from tests.sim.planting import planted
from tests.sim.telling import (
    BATCH_SEEDS,
    FOLDER,
    LINES_SHOWN,
    Progress,
    around,
    explain,
    moment_of,
    replay_command,
    shrink,
    simulated,
    table,
    tell,
)
from tests.sim.trace import Line

SEEDS = 2_000
# Of what takes long, fewer than other campaigns have.
QUICK = {"writers": 1_860, "database": 60, "two_phase": 35, "quorum": 45}
CRASHES_MIN = 20_000
PLANTED = "treat unknown as success"
REPEATED = {"writers": 4, "database": 2, "two_phase": 2, "quorum": 2}


@pytest.mark.timeout(3_600)
def test_many_seeds_break_no_invariant() -> None:
    """Writers, readers, compactors, collectors and safekeepers keep every invariant, whatever
    crashes, stands still, is lost, late, repeated or cut off; and when that stops, they serve.
    """
    tallies = run_campaign(shared(QUICK))
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


@pytest.mark.timeout(1_200)
def test_a_seed_is_one_run_in_every_process() -> None:
    """Equal tasks have equal traces in processes whose hashes and addresses differ.

    Safekeepers were woken in the order of their addresses once: any seed of `quorum` has shown it.
    """
    tasks = [*shared(REPEATED)]
    first, second = (
        {outcome.task: outcome.trace_hash for outcome in spread(run_task, tasks)} for _ in range(2)
    )
    assert first == second
    assert len(first) == sum(REPEATED.values())


def test_more_tasks_than_a_process_may_have_come_to_an_end() -> None:
    """Others take its place, also when few tasks are left."""
    assert sorted(spread(abs, range(202), processes=1)) == [*range(202)]


def test_a_process_that_dies_is_told() -> None:
    """With what was under way; nobody waits for it."""
    with pytest.raises(BrokenProcessPool) as raised:
        list(spread(os._exit, [3], processes=1))
    assert raised.value.__notes__ == ["under way: 3"]


def test_a_campaign_says_how_far_it_is() -> None:
    """A line for each batch, each failure at once, and in the end what was simulated."""
    said: list[str] = []
    tallies = {"writers": Tally()}
    progress = Progress(tallies, said.append)
    for seed in range(BATCH_SEEDS):
        outcome = Outcome(Task("writers", seed), "", 36.0, 1.0, 1, kind="I1" if seed == 7 else "")
        tallies["writers"].add(outcome)
        progress.see(outcome)
    failed, batch = said
    assert failed == "FAILED writers 7 I1: .venv/bin/python -m tests.sim replay writers 7"
    assert batch.endswith("s: 100 seeds, 0 crashes, 1.0 virtual hours, 1 failures")
    assert table(tallies).splitlines()[-1] == simulated()
    assert "server " in simulated()


def test_a_failure_is_told_where_it_happened() -> None:
    """Around the moment that its checker knows, or that of what its text names; without what goes
    on all the time.
    """
    made = "manifest/00000000000000000007.manifest: 9 bytes 12ab"
    events = [Line(at, "store", f"event {at}") for at in range(1_000)]
    events[500:500] = [Line(500, "store", "list manifest/ of w1: list"), Line(500, "store", made)]
    assert moment_of(Violation("I6: stale", at_us=3), events) == 3
    assert moment_of(Violation("I14: ReadOp(invoked_us=1, replied_us=4, got=None)"), events) == 4
    assert moment_of(Violation("I9: c goes down in manifest 7"), events) == 500
    assert moment_of(ValueError("manifest 7"), events) is None
    shown = [each.text for each in around(events, 500)]
    assert shown[0] == f"event {500 - LINES_SHOWN + 2}"
    assert shown[LINES_SHOWN - 2 : LINES_SHOWN + 1] == [made, "event 500", "event 501"]
    assert len(shown) == 2 * LINES_SHOWN
    assert around(events, None)[-1] == events[-1]


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
    assert re.search(rf"^{smallest.kind} (at|until) \d+\.\d{{6}} s:$", told, re.MULTILINE)
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
