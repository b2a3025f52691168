"""What a campaign says: a table of what was run; of a failure, the shortest run that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.sim.campaign import Tally
from tests.sim.options import ALL, EVERYTHING
from tests.sim.outcomes import Outcome, Task
from tests.sim.profiles import PROFILES
from tests.sim.run import Failure, attempt
from tests.sim.shrinking import shrink
from tests.sim.trace import timeline

FOLDER = Path(".cache/sim")  # of timelines
ALL_LINES = 1_000_000  # more than any run has
LINES_SHOWN = 60
_HEADINGS = ("profile", "seeds", "crashes", "pauses", "virtual hours", "x real time", "failures")


def table(tallies: Mapping[str, Tally]) -> str:
    """A line for each profile, and one for all of them."""
    total = Tally()
    for tally in tallies.values():
        total.merge(tally)
    rows = [_HEADINGS, *(_row(*each) for each in [*tallies.items(), ("all", total)])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def explain(failed: Outcome) -> str:
    """Tells the smallest run that fails like this one."""
    return f"{failed.task} failed; the smallest run like it:\n{tell(shrink(failed))}"


def tell(failed: Outcome) -> str:
    """The last events of a failed run, the file that has all of them, and how to replay it."""
    task = failed.task
    run = attempt(task.seed, PROFILES[task.profile], options=task.options, keep_lines=ALL_LINES)
    if not isinstance(run, Failure):
        return f"{task} failed once, and not again: {failed.problem}"
    path = FOLDER / f"{task.profile}-{task.seed}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{timeline(run.events)}\n\n{run.error!r}\n")
    return "\n".join(
        (
            timeline(run.events[-LINES_SHOWN:]),
            f"{failed.kind}: {failed.problem}",
            f"{len(run.events)} events: {path}",
            f"replay: {replay_command(task)}",
        )
    )


def replay_command(task: Task) -> str:
    """The command that runs this again and tells what happens."""
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


def _row(name: str, tally: Tally) -> tuple[str, ...]:
    return (
        name,
        f"{tally.seeds}",
        f"{tally.befallen['crashes']}",
        f"{tally.befallen['pauses']}",
        f"{tally.virtual_s / 3_600:.0f}",
        f"{tally.speed:.0f}",
        f"{len(tally.failures)}",
    )
