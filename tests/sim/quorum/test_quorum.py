"""The quorum WAL under chaos, by seed: I3, I4, I5, I11 and I13.

One seed: `pytest tests/sim/quorum -k with_a_seed --sim-seed N`.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.sim.quorum.world import World

CHUNKS, CHUNK_SEEDS = 25, 160
SOAK_CHUNKS = 1_000
EVENTS_SHOWN = 60
REPLAY = ".venv/bin/python -m pytest tests/sim/quorum -k with_a_seed --sim-seed"


def run(seed: int) -> World:
    """Run one seed; what breaks a rule is raised, after what had happened was told."""
    world = World(seed)
    try:
        world.run()
    except BaseException:
        told = world.timeline(EVENTS_SHOWN)
        sys.stderr.write(f"\nseed {seed} failed. Last:\n{told}\n\nreplay: {REPLAY} {seed}\n")
        raise
    return world


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_acknowledged_records_survive(chunk: int) -> None:
    """Crashes, torn and lost writes, bad and new disks, rivals and changes of members break none.

    I3: one record per number is ever acknowledged, one object per id archived. I4: objects have no
    gap. I5: promises, epochs and commit points never go back. I11: each later log has what was
    acknowledged, and only that is archived. I13: when faults stop, a writer can open.
    """
    for seed in range(chunk * CHUNK_SEEDS, (chunk + 1) * CHUNK_SEEDS):
        run(seed)


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(CHUNKS, SOAK_CHUNKS))
def test_acknowledged_records_survive_for_longer(chunk: int) -> None:
    """More seeds change nothing about that."""
    for seed in range(chunk * CHUNK_SEEDS, (chunk + 1) * CHUNK_SEEDS):
        run(seed)


@pytest.mark.seeds(1)
def test_acknowledged_records_survive_with_a_seed(seed: int) -> None:
    """The same for one seed, which `--sim-seed` chooses."""
    run(seed)


def test_equal_seeds_are_equal_runs() -> None:
    """A seed decides about everything."""
    assert run(7).timeline(10_000) == run(7).timeline(10_000)


def test_the_schedule_gets_to_where_bugs_are() -> None:
    """What the invariants are about happens often enough to be tested, by few seeds even."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        world = run(seed)
        seen.update(world.seen)
        seen["acknowledged records"] += len(world.judge.committed)
    sys.stdout.write("\n" + "\n".join(f"{count:6} {what}" for what, count in sorted(seen.items())))
    expected = {
        "acknowledged records": 800,
        "archived objects": 100,
        "changes finished": 10,
        "crashes": 150,
        "damages": 30,
        "elections": 200,
        "good ends": 80,
        "trims": 30,
        "twins": 5,
        "wipes": 15,
    }
    assert {what: seen[what] for what in expected if seen[what] < expected[what]} == {}
