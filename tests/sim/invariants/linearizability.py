"""I14 once more, by a search that knows nothing of the log (Wing and Gong, Lowe)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from random import Random

from tests.linearizability.checker import Undecided, judge, partitions
from tests.linearizability.operations import Call
from tests.sim.errors import Violation
from tests.sim.history import History
from tests.sim.invariants.asked import Translation, part_of
from tests.sim.invariants.catalogue import checks

STEPS_MAX = 2_000  # what is decided at all is decided by then, as a rule
JUDGED_SHARE = 0.25  # of the seeds

TOO_LONG = "that take too long"


def is_judged(seed: int) -> bool:
    """Whether the run with this seed is judged by the search, too: it takes its time."""
    return Random(f"{seed}/linearizability").random() < JUDGED_SHARE


@checks(14, "writers", "database")
def check_i14_linearizable(
    history: History, keys: Sequence[bytes], *, steps_max: int = STEPS_MAX
) -> Counter[str]:
    """Some order of the writes, conditions and linearizable reads explains all that was told.

    With them the committed reads before anybody else had taken over. Each key is judged alone, with
    its reads; then writes and transactions together, over all keys that they tie, or if that takes
    too long over any two. A search that takes too long is given up and counted.
    """
    translation = Translation(keys)
    calls = translation.calls(history)
    reads = translation.reads(history)
    found: Counter[str] = Counter()
    for key in keys:
        part = [*part_of([key], calls), *part_of([key], reads)]
        found[f"keys {_judge(part, steps_max)}"] += 1
    for part in partitions(calls):
        tied = {key for call in part for key in call.operation.keys}
        if len(tied) == 1:
            continue
        outcome = _judge(part, steps_max)
        found[f"ties {outcome}"] += 1
        if outcome == TOO_LONG:
            for pair in combinations(sorted(tied), 2):
                found[f"pairs {_judge([*part_of(pair, part)], steps_max)}"] += 1
    return found


def _judge(part: Sequence[Call], steps_max: int) -> str:
    try:
        verdict = judge(part, steps_max=steps_max)
    except Undecided:
        return TOO_LONG
    if not verdict.is_linearizable:
        raise Violation(f"I14: {verdict}")
    return "judged"
