"""The shortest run that still fails: less chaos, fewer clients, fewer kinds of trouble.

What a seed decides is drawn whether it is done or not, so a shorter run is a prefix of the longer
one, and one with less trouble is the same with gaps. A run counts as failing only if its failure is
of the same kind: shrinking must not end at another bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.sim.options import Options, Trouble
from tests.sim.outcomes import Outcome, run_task

RUNS_MAX = 80


def shrink(
    failed: Outcome,
    run: Callable[[Options], Outcome] | None = None,
    *,
    runs_max: int = RUNS_MAX,
) -> Outcome:
    """The outcome of the smallest run that was found to fail like `failed`, maybe that itself.

    `run` runs the same seed with other options, at most `runs_max` times.
    """
    task = failed.task
    run = run or (lambda options: run_task(replace(task, options=options)))
    best, before = failed, None
    tried = {task.options}
    while best is not before:
        before = best
        for smaller in _MOVES:
            options = smaller(best.task.options)
            if options in tried or len(tried) > runs_max:
                continue
            tried.add(options)
            outcome = run(options)
            if outcome.kind == failed.kind:
                best = outcome
    return best


def _without(trouble: Trouble) -> Callable[[Options], Options]:
    return lambda options: options.without(trouble)


def _clients(fewer: Callable[[int], int]) -> Callable[[Options], Options]:
    return lambda options: replace(options, clients=max(1, fewer(options.clients)))


def _steps(fewer: Callable[[int], int]) -> Callable[[Options], Options]:
    return lambda options: replace(options, chaos_steps=max(0, fewer(options.chaos_steps)))


# Each is tried once in a round, on the smallest run so far, and rounds follow until one has found
# nothing. The large steps come first, and more than once, as each may go on from the one before.
_MOVES: Sequence[Callable[[Options], Options]] = (
    _steps(lambda _: 0),
    *[_steps(lambda count: count // 2)] * 5,
    *(_without(trouble) for trouble in Trouble),
    _clients(lambda _: 1),
    *[_clients(lambda count: count - 1)] * 2,
    *[_steps(lambda count: count * 3 // 4)] * 3,
    *[_steps(lambda count: count - 1)] * 4,
)
