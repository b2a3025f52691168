"""One run of a profile with a seed, as a task for any process, and what came of it.

Both are plain values: they travel between processes.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from tests.sim.errors import UnhandledErrors
from tests.sim.levels import only_writers, whole_database
from tests.sim.options import ALL, Options
from tests.sim.quorum.world import quorum_core
from tests.sim.run import Failure, Main, attempt
from tests.sim.safekeepers.database import quorum_database
from tests.sim.two_phase.database import two_phase_database

PROFILES: Mapping[str, Main[object]] = {
    "writers": only_writers,
    "database": whole_database,
    "two_phase": two_phase_database,
    "quorum": quorum_database,
    "quorum_core": quorum_core,  # the pure core alone, without the rest of a database
}

_NUMBERS = re.compile(r"(?:I\d+|F\d+)(?:, (?:I\d+|F\d+))*")


@dataclass(frozen=True, slots=True)
class Task:
    """What to run."""

    profile: str
    seed: int
    options: Options = ALL

    def __str__(self) -> str:
        return f"{self.profile} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. Equal tasks give equal outcomes, but for `cpu_s`."""

    task: Task
    trace_hash: str
    virtual_s: float
    cpu_s: float
    steps: int  # callbacks that ran
    befallen: Counter[str] = field(default_factory=Counter)  # crashes and pauses
    # Of the failure: two of one kind have one cause, most likely. Empty: all is well.
    kind: str = ""
    problem: str = ""  # what failed, in words

    @property
    def has_failed(self) -> bool:
        return bool(self.kind)


def run_task(task: Task) -> Outcome:
    """Run it here and now."""
    began_s = time.process_time()
    run = attempt(task.seed, PROFILES[task.profile], options=task.options)
    cpu_s = time.process_time() - began_s
    what = (run.trace_hash, run.virtual_s, cpu_s, run.steps, run.befallen)
    if not isinstance(run, Failure):
        return Outcome(task, *what)
    if not isinstance(run.error, Exception):  # somebody wants to stop
        raise run.error
    return Outcome(task, *what, kind=kind_of(run.error), problem=f"{run.error!r}")


def kind_of(error: BaseException) -> str:
    """The invariants that an error names, or what sort of error it is (`first_of` several)."""
    error = first_of(error)
    numbers = _NUMBERS.match(str(error)) if isinstance(error, AssertionError) else None
    return numbers.group() if numbers else type(error).__name__


def first_of(error: BaseException) -> BaseException:
    """What went wrong: of several things at once, or that nobody looked at, the first."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, UnhandledErrors) and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def silence_logs() -> None:
    """Nobody reads what the simulated processes log; formatting it would take longer than they."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
