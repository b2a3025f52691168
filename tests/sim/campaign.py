"""Many seeds, in as many processes as there are cores: a fixed number, or what fits into a time.

Each run is a task of its own: which process takes it, and when, decides nothing about it.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from random import Random
from typing import TypeVar

import structlog

from tests import workers
from tests.sim.errors import UnhandledErrors
from tests.sim.levels import only_writers, whole_database
from tests.sim.options import ALL, Options
from tests.sim.quorum.schedule import quorum_core
from tests.sim.run import Failure, Main, attempt
from tests.sim.safekeepers.chaos import quorum_database
from tests.sim.two_phase.judge import two_phase_database

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
    """One run: a profile, a seed and options."""

    profile: str
    seed: int
    options: Options = ALL

    def __str__(self) -> str:
        return f"{self.profile} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a task. Equal tasks give equal outcomes, except for `cpu_s`."""

    task: Task
    trace_hash: str
    virtual_s: float
    cpu_s: float
    steps: int  # callbacks that ran
    befallen: Counter[str] = field(default_factory=Counter)  # crashes and pauses
    # Kind of the failure: two failures of one kind most likely have one cause. Empty: success.
    kind: str = ""
    problem: str = ""  # description of the failure

    @property
    def has_failed(self) -> bool:
        return bool(self.kind)


def run_task(task: Task) -> Outcome:
    began_s = time.process_time()
    run = attempt(task.seed, PROFILES[task.profile], options=task.options)
    cpu_s = time.process_time() - began_s
    what = (run.trace_hash, run.virtual_s, cpu_s, run.steps, run.befallen)
    if not isinstance(run, Failure):
        return Outcome(task, *what)
    if not isinstance(run.error, Exception):  # an interrupt
        raise run.error
    return Outcome(task, *what, kind=kind_of(run.error), problem=f"{run.error!r}")


def kind_of(error: BaseException) -> str:
    """The invariants that an error names, or what sort of error it is (`first_of` several)."""
    error = first_of(error)
    numbers = _NUMBERS.match(str(error)) if isinstance(error, AssertionError) else None
    return numbers.group() if numbers else type(error).__name__


def first_of(error: BaseException) -> BaseException:
    """Return the error that matters: the first of a group, or of unhandled errors."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, UnhandledErrors) and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def silence_logs() -> None:
    """Drop the logs of simulated processes; formatting them would take longer than the run."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


T = TypeVar("T")
R = TypeVar("R")

# Seeds of each profile in a campaign of 2,000: what is quick has more.
SHARES: Mapping[str, int] = {"writers": 1_500, "database": 220, "two_phase": 120, "quorum": 160}

# Seeds of the pure core of the quorum WAL for each seed above: a run takes milliseconds.
CORE_SHARE = 2
# Shares of the time of a time-boxed campaign.
WEIGHTS: Mapping[str, float] = {
    "writers": 0.3,
    "database": 0.27,
    "two_phase": 0.15,
    "quorum": 0.2,
    "quorum_core": 0.08,
}
FAILURES_MAX = 3  # then no more are begun

AHEAD = 4  # tasks that wait for each process
_GUESSED_CPU_S = 1.0  # of a run, before one of its profile is done
_TASKS_PER_PROCESS = 200  # on average, then new ones begin: what a process keeps goes with it


@dataclass(slots=True)
class Tally:
    """Results of the runs of one profile."""

    seeds: int = 0
    befallen: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.befallen += outcome.befallen
        self.virtual_s += outcome.virtual_s
        self.cpu_s += outcome.cpu_s
        if outcome.has_failed:
            self.failures.append(outcome)

    def merge(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.befallen += other.befallen
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.failures += other.failures

    @property
    def speed(self) -> float:
        return self.virtual_s / self.cpu_s if self.cpu_s else math.inf


def run_campaign(
    tasks: Iterable[Task],
    *,
    processes: int | None = None,
    into: dict[str, Tally] | None = None,
    seen: Callable[[Outcome], None] | None = None,
    ahead: int = AHEAD,
) -> dict[str, Tally]:
    """Run all `tasks`, by profile; start no more after this many failures.

    `into` has the finished runs even if this is interrupted; each outcome is passed to `seen` at
    once.
    """
    tallies: dict[str, Tally] = {} if into is None else into
    with closing(spread(run_task, tasks, processes=processes, ahead=ahead)) as outcomes:
        for outcome in outcomes:
            tallies.setdefault(outcome.task.profile, Tally()).add(outcome)
            if seen is not None:
                seen(outcome)
            if sum(len(tally.failures) for tally in tallies.values()) >= FAILURES_MAX:
                break
    return tallies


def total_of(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total


def one_of_each_kind(failures: Sequence[Outcome]) -> Sequence[Outcome]:
    """The first failure of each kind in each profile: the others have the same cause, or wait."""
    return [*{(each.task.profile, each.kind): each for each in reversed(failures)}.values()]


def scaled(shares: Mapping[str, int], seeds: int) -> dict[str, int]:
    """Return counts in the same proportions with this sum, each at least one."""
    total = sum(shares.values())
    counts = {name: max(1, round(seeds * share / total)) for name, share in shares.items()}
    largest = max(counts, key=counts.__getitem__)  # rounding matters least there
    counts[largest] = max(1, counts[largest] + seeds - sum(counts.values()))
    return counts


def shared(shares: Mapping[str, int], first_seed: int = 0) -> Iterator[Task]:
    """Yield this many seeds of each profile, interleaved, so that any section has some of each."""
    order = [
        (number / count, profile, first_seed + number)
        for profile, count in shares.items()
        for number in range(count)
    ]
    return (Task(profile, seed) for _, profile, seed in sorted(order))


class TimeBox:
    """Seeds of all profiles until a time, by their weights; which ones, `random` draws.

    No run is begun that is not expected to end in time; one of each profile is in any case.
    """

    def __init__(
        self,
        seconds: float,
        random: Random,
        tallies: Mapping[str, Tally],
        weights: Mapping[str, float] = WEIGHTS,
    ) -> None:
        """`tallies` have the cost of runs up to now; the campaign updates them."""
        self._end_s = time.monotonic() + seconds
        self._random = random
        self._tallies = tallies
        self._weights = weights
        self._begun: Counter[str] = Counter()

    def tasks(self) -> Iterator[Task]:
        """One after the other, each drawn when it is asked for."""
        while self._failure_count() < FAILURES_MAX:
            profile = min(self._weights, key=lambda each: self._spent_s(each) / self._weights[each])
            late = time.monotonic() + 2 * self._cpu_s(profile) > self._end_s
            if late and len(self._begun) == len(self._weights):
                return
            self._begun[profile] += 1
            yield Task(profile, self._random.getrandbits(31))

    def _failure_count(self) -> int:
        return sum(len(tally.failures) for tally in self._tallies.values())

    def _cpu_s(self, profile: str) -> float:
        tally = self._tallies.get(profile)
        return tally.cpu_s / tally.seeds if tally else _GUESSED_CPU_S

    def _spent_s(self, profile: str) -> float:
        """With what the runs that are under way are expected to take."""
        return self._begun[profile] * self._cpu_s(profile)


def spread(
    function: Callable[[T], R],
    values: Iterable[T],
    *,
    processes: int | None = None,
    ahead: int = AHEAD,
) -> Generator[R, None, None]:
    """Return the results of a function over many values, in their order.

    It runs in other processes, by default one for each core; `ahead` values are taken in advance
    for each. If a process dies, `BrokenProcessPool` is raised, with a note of the values in
    progress.
    """
    count = processes or workers.cores()
    waiting = iter(values)
    # A pool whose processes are replaced while it works may hang (python/cpython#115634).
    for first in waiting:
        part = chain([first], islice(waiting, count * _TASKS_PER_PROCESS - 1))
        yield from _spread_in_one_pool(function, part, count, ahead)


def _spread_in_one_pool(
    function: Callable[[T], R], values: Iterator[T], count: int, ahead: int
) -> Generator[R, None, None]:
    context = multiprocessing.get_context("spawn")
    under_way: dict[Future[R], T] = {}
    pool = ProcessPoolExecutor(count, context, initializer=_begin)
    try:
        while True:
            for value in islice(values, count * ahead - len(under_way)):
                under_way[pool.submit(function, value)] = value
            if not under_way:
                return
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
                del under_way[future]
    except BrokenProcessPool as error:
        error.add_note(f"under way: {', '.join(map(str, under_way.values()))}")
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Set up a worker process: an interrupt of the campaign needs no tracebacks of its runs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    silence_logs()
