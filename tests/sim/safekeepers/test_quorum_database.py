"""The workload of a database with safekeepers: equal seeds are equal runs, and it gets to bugs."""

from __future__ import annotations

import sys
from collections import Counter

from tests.sim.run import simulate
from tests.sim.safekeepers.database import QuorumRun, quorum_database


def test_a_run_with_safekeepers_is_the_same_each_time() -> None:
    """Equal seeds give equal traces."""
    assert len({simulate(3, quorum_database).trace_hash for _ in range(2)}) == 1


# What eight seeds have at least, at about half of what they have.
EXPECTED = {
    "Appended told": 600,
    "Joined told": 120,
    "Vote told": 80,
    "archivers that went on behind others": 10,
    "changes begun": 2,
    "disks lost": 2,
    "segments torn": 2,
    "writers that went on behind others": 15,
}


def notable(run: QuorumRun) -> Counter[str]:
    """How often what happened that matters."""
    endings = Counter(f"writers that ended with {each}" for each in run.cluster.history.endings)
    return run.seen + endings


def test_the_workload_gets_to_where_bugs_of_safekeepers_are() -> None:
    """What the invariants are about happens often enough to be tested, by few seeds even."""
    seen: Counter[str] = Counter()
    for seed in range(100, 108):
        seen += notable(simulate(seed, quorum_database).value)
    sys.stdout.write("\n" + "\n".join(f"{count:6} {what}" for what, count in sorted(seen.items())))
    assert {what: seen[what] for what in EXPECTED if seen[what] < EXPECTED[what]} == {}
