"""The workload of the whole database gets to where bugs are, likewise."""

from __future__ import annotations

import sys
from collections import Counter

from tests.sim.levels import WholeRun, whole_database
from tests.sim.run import simulate


def notable(run: WholeRun) -> Counter[str]:
    """How often what happened that matters."""
    seen = Counter(run.seen)
    seen += Counter({f"deleted in {name}": n for name, n in run.guard.seen.items()})
    seen += Counter({f"slow scans: {name}": n for name, n in run.scans.endings.items()})
    seen += Counter({f"reads of replicas: {name}": n for name, n in run.replicas.endings.items()})
    seen += Counter(run.janitors.endings)
    seen["reads of snapshots"] = sum(len(each.reads) for each in run.readers.snapped)
    seen += Counter(f"snapshots that were {each.ending}" for each in run.readers.snapped)
    return seen


def test_the_workload_gets_to_where_bugs_of_the_levels_are() -> None:
    """What the invariants are about happens often enough to be tested, by few seeds even."""
    seen: Counter[str] = Counter()
    for seed in range(100, 108):
        seen += notable(simulate(seed, whole_database).value)
    sys.stdout.write("\n" + "\n".join(f"{count:6} {what}" for what, count in sorted(seen.items())))
    expected = {
        "deleted in levels": 50,
        "deleted in manifest": 200,
        "deleted in wal": 50,
        "levels that were checked": 60,
        "reads of snapshots": 20,
        "slow scans: done": 10,
    }
    assert {what: seen[what] for what in expected if seen[what] < expected[what]} == {}
