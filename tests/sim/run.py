"""Running a simulation: one seed, one main task, a world of nodes around one store.

Example:
    async def main(world: World) -> None:
        ...

    simulate(seed, main)
"""

from __future__ import annotations

import os
import random
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tests.sim.burial import collect_later, collect_now
from tests.sim.errors import UnhandledErrors
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.trace import timeline
from tests.sim.world import World

T = TypeVar("T")

LIMIT_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """How a run went. Equal seeds give equal `trace_hash`es."""

    value: T  # what the main task returned
    trace_hash: str
    virtual_s: float
    steps: int  # callbacks that ran


def simulate(
    seed: int,
    main: Callable[[World], Coroutine[Any, Any, T]],
    *,
    faults: Faults | None = None,
    limit_s: float = LIMIT_S,
) -> Run[T]:
    """Run ``main(world)`` on the root node until it returns; what else runs then just ends.

    Raises what `main` raises; `Deadlock`, `Livelock`, and `OutOfTime` after `limit_s` of virtual
    time; `UnhandledErrors` if a callback or task failed on a node that has not crashed and nobody
    looked at its error. Before that it prints the seed, the last events, and how to replay.
    """
    with collect_later(), _seeded_module(seed):
        return _run(seed, main, faults or Faults.none(), limit_s)


def _run(
    seed: int, main: Callable[[World], Coroutine[Any, Any, T]], faults: Faults, limit_s: float
) -> Run[T]:
    loop = SimLoop(seed, limit_s=limit_s)
    try:
        value = loop.run_until_complete(main(World(seed, loop, faults)))
        loop.let_go()
        collect_now()  # an error that nobody looked at shows when its task is collected
        _check_unhandled(loop)
        return Run(value, loop.trace.digest(), loop.time(), loop.trace.step_count)
    except BaseException:
        sys.stderr.write(_report(seed, loop))
        raise
    finally:
        loop.close()


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
    """The command that runs the current test with this seed only."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if not test:
        return f"simulate({seed}, ...)"
    option = f" --sim-seed {seed}" if "seed" in test.rpartition("[")[2] else ""
    python = os.path.relpath(sys.executable)
    return f"{shlex.quote(python)} -m pytest {shlex.quote(test)}{option}"


@contextmanager
def _seeded_module(seed: int) -> Iterator[None]:
    """Seed the module `random` too: libraries draw their jitter from it."""
    state = random.getstate()
    random.seed(f"{seed}/module")
    try:
        yield
    finally:
        random.setstate(state)
