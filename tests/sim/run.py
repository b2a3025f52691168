"""Running a simulation: one seed, one main task, nodes around one object store.

Example:
    async def main(sim: Simulation) -> None:
        ...

    simulate(seed, main)
"""

from __future__ import annotations

import os
import random
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from tests.kit.constants import undo_drawn
from tests.sim.errors import UnhandledErrors
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.options import ALL, Options
from tests.sim.simulation import Simulation
from tests.sim.tasks import collect_later, collect_now
from tests.sim.trace import KEEP_LINES, Line, timeline

T = TypeVar("T")
Main: TypeAlias = Callable[[Simulation], Coroutine[Any, Any, T]]

LIMIT_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """Result of a run. Equal seeds give equal `trace_hash`es."""

    value: T  # return value of the main task
    trace_hash: str
    virtual_s: float
    steps: int  # callbacks that ran
    befallen: Counter[str]  # crashes and pauses of nodes
    events: Sequence[Line]  # the last of them


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a run."""

    error: BaseException
    trace_hash: str
    virtual_s: float
    steps: int
    befallen: Counter[str]
    events: Sequence[Line]  # the last of them
    report: str  # for people: the seed, the last callbacks and events, how to replay


def simulate(
    seed: int,
    main: Main[T],
    *,
    faults: Faults | None = None,
    options: Options = ALL,
    limit_s: float = LIMIT_S,
) -> Run[T]:
    """Run ``main(sim)`` on the root node until it returns; other tasks end with it.

    Raises what `main` raises; `Deadlock`, `Livelock`, and `OutOfTime` after `limit_s` of virtual
    time; `UnhandledErrors` if a callback or task failed on a node that has not crashed and its
    error was not retrieved. Before that it prints the seed, the last events, and the replay
    command.
    """
    outcome = attempt(seed, main, faults=faults, options=options, limit_s=limit_s)
    if isinstance(outcome, Failure):
        sys.stderr.write(outcome.report)
        raise outcome.error
    return outcome


def attempt(
    seed: int,
    main: Main[T],
    *,
    faults: Faults | None = None,
    options: Options = ALL,
    limit_s: float = LIMIT_S,
    keep_lines: int = KEEP_LINES,
) -> Run[T] | Failure:
    """Same as `simulate`, but raises and prints nothing. Keeps this many lines of the trace."""
    with collect_later(), _seeded_module(seed):
        loop = SimLoop(seed, limit_s=limit_s, keep_lines=keep_lines)
        try:
            return _run(loop, main, Simulation(seed, loop, faults or Faults.none(), options))
        except BaseException as error:  # noqa: BLE001 - reported, and raised by the caller
            trace = loop.trace
            return Failure(
                error,
                trace.digest(),
                loop.time(),
                trace.step_count,
                Counter(loop.befallen),
                tuple(trace.events),
                _report(seed, loop),
            )
        finally:
            loop.close()
            undo_drawn()


def _run(loop: SimLoop, main: Main[T], sim: Simulation) -> Run[T]:
    value = loop.run_until_complete(main(sim))
    loop.drop_done()
    collect_now()  # an error that was not retrieved shows when its task is collected
    _check_unhandled(loop)
    trace = loop.trace
    return Run(
        value,
        trace.digest(),
        loop.time(),
        trace.step_count,
        Counter(loop.befallen),
        tuple(trace.events),
    )


def _check_unhandled(loop: SimLoop) -> None:
    if loop.unhandled:
        errors = [error for _, _, error in loop.unhandled if error is not None]
        raise UnhandledErrors(_unhandled_text(loop)) from (errors[0] if errors else None)


def _unhandled_text(loop: SimLoop) -> str:
    lines = [f"{node}: {message}: {error!r}" for node, message, error in loop.unhandled]
    return "\n".join(["errors that nobody looked at:", *lines])


def _report(seed: int, loop: SimLoop) -> str:
    trace = loop.trace
    at = f"virtual time {loop.time():.6f} s, {trace.step_count} callbacks"
    parts = [
        f"\nsimulation failed: seed {seed}, {at}, trace {trace.digest()}",
        f"last callbacks:\n{timeline(trace.steps)}",
        f"last events:\n{timeline(trace.events)}",
        f"replay: {_replay_command(seed)}\n",
    ]
    if loop.unhandled:
        parts.insert(1, _unhandled_text(loop))
    return "\n\n".join(parts)


def _replay_command(seed: int) -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if not test:
        return f"simulate({seed}, ...)"
    python = os.path.relpath(sys.executable)
    return f"{shlex.quote(python)} -m pytest {shlex.quote(test)}"


@contextmanager
def _seeded_module(seed: int) -> Iterator[None]:
    """Seed the module `random` too: libraries draw their jitter from it."""
    state = random.getstate()
    random.seed(f"{seed}/module")
    try:
        yield
    finally:
        random.setstate(state)
