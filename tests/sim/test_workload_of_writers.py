"""The workload of writers gets to where bugs are: what invariants are about happens often."""

from __future__ import annotations

import sys
from collections import Counter

from tests.sim.cluster import Cluster
from tests.sim.history import Got, Outcome, Told
from tests.sim.run import simulate
from tests.sim.stored import Stored
from tests.sim.writers import only_writers


def test_the_workload_gets_to_where_bugs_are() -> None:
    """What the invariants are about happens often enough to be tested, by few seeds even."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        cluster, checked = simulate(seed, only_writers).value
        seen.update(notable(cluster, checked.stored))
    sys.stdout.write("\n" + "\n".join(f"{count:6} {what}" for what, count in sorted(seen.items())))
    expected = {
        "slots behind a newer writer that a slow opener took": 50,
        "operations that were repeated": 200,
        "operations that were repeated at a later writer": 100,
        "acknowledgements that repeats got": 200,
        "repeats after their window": 20,
        "refused conditions": 50,
        "transactions that only read": 20,
        "values that expired": 20,
        "range deletes in the log": 50,
        "writers that were fenced": 50,
    }
    assert {what: seen[what] for what in expected if seen[what] < expected[what]} == {}


def notable(cluster: Cluster, stored: Stored) -> Counter[str]:
    """How often what happened that matters."""
    seen: Counter[str] = Counter()
    seen["slots behind a newer writer that a slow opener took"] = stored.displacements()
    seen["writers that were fenced"] = cluster.history.endings.count("FENCED")
    for commit in stored.commits():
        seen["range deletes in the log"] += len(commit.ranges)
        expiries = [entry.expire_at_ms for entry in commit.points.values() if entry.expire_at_ms]
        seen["values that expired"] += sum(ms <= stored.wal[-1].logical_time_ms for ms in expiries)
    for operation in cluster.history.operations:
        attempts = operation.attempts
        seen["operations"] += 1
        seen["operations that were repeated"] += len(attempts) > 1
        epochs = {attempt.epoch for attempt in attempts}
        seen["operations that were repeated at a later writer"] += len(epochs) > 1
        acknowledged = [each for each in attempts if each.outcome is Outcome.ACKNOWLEDGED]
        seen["acknowledgements that repeats got"] += max(0, len(acknowledged) - 1)
        for attempt in attempts:
            seen[f"attempts {attempt.outcome.value}"] += 1
            seen["refused conditions"] += attempt.reason == "CONDITION_FAILED"
            seen["repeats after their window"] += attempt.reason == "IDEMPOTENCY_KEY_EXPIRED"
            results = attempt.answer.results if isinstance(attempt.answer, Told) else ()
            is_reading = bool(results) and all(isinstance(each, Got) for each in results)
            seen["transactions that only read"] += is_reading
    return seen
