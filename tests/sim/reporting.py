"""Output of a campaign: progress, a table of the runs, and for a failure the shortest run that
reproduces it.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.sim.campaign import PROFILES, Outcome, Tally, Task, first_of, run_task, total_of
from tests.sim.errors import Violation
from tests.sim.options import ALL, EVERYTHING, Options, Trouble
from tests.sim.run import Failure, attempt
from tests.sim.trace import Line, timeline

RUNS_MAX = 80


def shrink(failed: Outcome) -> Outcome:
    """The outcome of the smallest run that was found to fail like `failed`, maybe that itself."""
    shrinking = _Shrinking(failed)
    before = None
    while shrinking.best is not before:
        before = shrinking.best
        shrinking.bisect_steps()
        for smaller in _MOVES:
            shrinking.attempt(smaller(shrinking.best.task.options))
    return shrinking.best


class _Shrinking:
    """The smallest run up to now, and the options that were tried."""

    def __init__(self, failed: Outcome) -> None:
        self.best = failed
        self._left = RUNS_MAX
        self._kinds = {failed.task.options: failed.kind}

    def attempt(self, options: Options) -> bool:
        """Return whether a run with these fails alike; it is the best one then."""
        if options not in self._kinds and self._left:
            self._left -= 1
            outcome = run_task(replace(self.best.task, options=options))
            self._kinds[options] = outcome.kind
            if outcome.kind == self.best.kind:
                self.best = outcome
        return self._kinds.get(options) == self.best.kind

    def bisect_steps(self) -> None:
        """The least chaos that is enough, if more of it is never less of a trouble."""
        options = self.best.task.options
        enough, too_few = options.chaos_steps, -1
        while enough - too_few > 1:
            steps = (enough + too_few) // 2 if too_few >= 0 else 0
            if self.attempt(replace(options, chaos_steps=steps)):
                enough = steps
            else:
                too_few = steps


def _without(trouble: Trouble) -> Callable[[Options], Options]:
    return lambda options: options.without(trouble)


def _clients(fewer: Callable[[int], int]) -> Callable[[Options], Options]:
    return lambda options: replace(options, clients=max(1, fewer(options.clients)))


# Each is tried once in a round, on the smallest run up to now, after fewer steps; the last round is
# the one that finds nothing.
_MOVES: Sequence[Callable[[Options], Options]] = (
    *(_without(trouble) for trouble in Trouble),
    _clients(lambda _: 1),
    *[_clients(lambda count: count - 1)] * 2,
)


ROOT = Path(__file__).parents[2]
FOLDER = Path(".cache/sim")  # of timelines
ALL_LINES = 1_000_000  # more than any run has
LINES_SHOWN = 30  # on each side of what went wrong
BATCH_SEEDS = 100  # progress is reported after this many
# The folders that decide about every run.
SIMULATED = ("server", "clients/python/shalekv", "tests/sim")
_HEADING = "profile       seeds  crashes  pauses  virtual hours  x real time  failures"
# Polls of the manifest and of the clock, which all processes repeat.
_DULL = re.compile(r"list \S+ of \S+: list$|now_ms\b")
_REPLIED = re.compile(r"\breplied_us=(\d+)")


class Progress:
    """Reports the progress of a campaign, line by line, and each failure at once."""

    def __init__(self, tallies: Mapping[str, Tally], say: Callable[[str], None]) -> None:
        self._tallies = tallies
        self._say = say
        self._began_s = time.monotonic()

    def see(self, outcome: Outcome) -> None:
        task = outcome.task
        if outcome.has_failed:
            self._say(f"FAILED {task.profile} {task.seed} {outcome.kind}: {replay_command(task)}")
        total = total_of(self._tallies.values())
        if total.seeds % BATCH_SEEDS == 0:
            self._say(
                f"{time.monotonic() - self._began_s:8.0f} s: {total.seeds} seeds, "
                f"{total.befallen['crashes']} crashes, {total.virtual_s / 3_600:.1f} virtual "
                f"hours, {len(total.failures)} failures"
            )


def table(tallies: Mapping[str, Tally], began_with: str | None = None) -> str:
    """Return a line for each profile, one for all of them, and what was simulated.

    The latter is there twice if it was something else at the beginning: processes start with the
    code that is there.
    """
    rows = [*tallies.items(), ("all", total_of(tallies.values()))]
    lines = [_HEADING, *(_row(name, tally) for name, tally in rows)]
    return "\n".join([*lines, *dict.fromkeys([began_with or simulated(), simulated()])])


def simulated() -> str:
    """Return the simulated code: git's tree ids, which can be found in any commit that has them."""
    parts = [f"{folder} {_tree_id(folder)}" for folder in SIMULATED]
    return f"{time.strftime('%Y-%m-%d')}: {', '.join(parts)}"


def explain(failed: Outcome) -> str:
    """Describe the smallest run that fails like this one."""
    return f"{failed.task} failed; the smallest run like it:\n{describe(shrink(failed))}"


def describe(failed: Outcome) -> str:
    """Describe the events around a failure; name the file with all of them, and the replay."""
    task = failed.task
    run = attempt(task.seed, PROFILES[task.profile], options=task.options, keep_lines=ALL_LINES)
    if not isinstance(run, Failure):
        return f"{task} failed once, and not again: {failed.problem}"
    path = FOLDER / f"{task.profile}-{task.seed}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{timeline(run.events)}\n\n{run.error!r}\n")
    at_us = moment_of(run.error)
    when = f"at {at_us / 1e6:.6f} s" if at_us is not None else f"until {run.virtual_s:.6f} s"
    return "\n".join(
        (
            timeline(around(run.events, at_us)),
            "",
            f"{failed.kind} {when}:",
            f"  {first_of(run.error)}",
            f"all {len(run.events)} events: {path}",
            f"replay: {replay_command(task)}",
        )
    )


def moment_of(error: BaseException) -> int | None:
    """Return the time of the failure: that of the checker, or of the reply that it names."""
    error = first_of(error)
    if not isinstance(error, Violation):
        return None
    replied = _REPLIED.search(str(error))
    return int(replied[1]) if error.at_us is None and replied is not None else error.at_us


def around(events: Sequence[Line], at_us: int | None) -> Sequence[Line]:
    """Return the events around a moment, without repeated polls; None: the last ones."""
    relevant = [each for each in events if not _DULL.match(each.text)]
    at = len(relevant) if at_us is None else sum(each.at_us <= at_us for each in relevant)
    return relevant[max(0, at - LINES_SHOWN) : at + LINES_SHOWN]


def replay_command(task: Task) -> str:
    """Return the command that runs this again and shows its events."""
    options = task.options
    words = [".venv/bin/python -m tests.sim replay", task.profile, str(task.seed)]
    if options.chaos_steps != ALL.chaos_steps:
        words.append(f"--steps {options.chaos_steps}")
    if options.clients != ALL.clients:
        words.append(f"--clients {options.clients}")
    words += [
        f"--without {each}" for each in sorted(e.value for e in EVERYTHING - options.troubles)
    ]
    return " ".join(words)


def _tree_id(folder: str) -> str:
    """Its id; dirty: it is not what is simulated, as something is not committed."""
    tree = _git("rev-parse", "--verify", "--quiet", f"HEAD:{folder}")
    is_dirty = bool(_git("status", "--porcelain", "--", folder))
    return f"{tree or 'unknown'}{'-dirty' if is_dirty else ''}"


def _git(*arguments: str) -> str:
    try:
        ended = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return ended.stdout.strip()


def _row(name: str, tally: Tally) -> str:
    crashes, pauses = tally.befallen["crashes"], tally.befallen["pauses"]
    return (
        f"{name:12}{tally.seeds:7}{crashes:9}{pauses:8}{tally.virtual_s / 3_600:15.0f}"
        f"{tally.speed:13.0f}{len(tally.failures):10}"
    )
