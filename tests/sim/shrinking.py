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
    shrinking = _Shrinking(
        failed, run or (lambda options: run_task(replace(task, options=options))), runs_max
    )
    before = None
    while shrinking.best is not before:
        before = shrinking.best
        shrinking.bisect_steps()
        for smaller in _MOVES:
            shrinking.attempt(smaller(shrinking.best.task.options))
    return shrinking.best


class _Shrinking:
    """The smallest run so far, and what was tried."""

    def __init__(self, failed: Outcome, run: Callable[[Options], Outcome], runs_max: int) -> None:
        self.best = failed
        self._run = run
        self._left = runs_max
        self._kinds = {failed.task.options: failed.kind}

    def attempt(self, options: Options) -> bool:
        """Whether a run with these fails alike; it is the best one then."""
        if options not in self._kinds and self._left:
            self._left -= 1
            outcome = self._run(options)
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


# Each is tried once in a round, on the smallest run so far, after fewer steps; rounds follow until
# one has found nothing.
_MOVES: Sequence[Callable[[Options], Options]] = (
    *(_without(trouble) for trouble in Trouble),
    _clients(lambda _: 1),
    *[_clients(lambda count: count - 1)] * 2,
)
