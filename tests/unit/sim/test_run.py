"""Runs: the same seed does the same, and a failure says how to see it again."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.sim.errors import UnhandledErrors
from tests.sim.run import simulate
from tests.sim.world import World
from tests.unit.sim import scenario

ROOT = Path(__file__).resolve().parents[3]
SEEDS = (1, 2, 3, 4, 5)
PRINT_HASHES = f"""
import sys
from tests.unit.sim import scenario
garbage = [object() for _ in range(int(sys.argv[1]))]
sys.stdout.write(" ".join(scenario.run(seed).trace_hash for seed in {SEEDS}))
"""


def test_the_same_seed_does_the_same() -> None:
    """A seed gives one trace, whatever ran before it; other seeds give others."""
    first = [scenario.run(seed) for seed in SEEDS]
    again = [scenario.run(seed) for seed in reversed(SEEDS)]
    assert first == again[::-1]
    assert len({run.trace_hash for run in first}) == len(SEEDS)


def test_the_trace_depends_on_no_process() -> None:
    """Two processes with other hash seeds and other addresses give the trace of this one."""
    here = " ".join(scenario.run(seed).trace_hash for seed in SEEDS)
    for hash_seed, garbage in (("1", "7"), ("4242", "100000")):
        command = [sys.executable, "-c", PRINT_HASHES, garbage]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert there.stdout == here


def test_runs_are_fast() -> None:
    """The loop runs a hundred thousand callbacks in a second or so, a scenario far above time."""

    async def yields(_: World) -> None:
        async def spin() -> None:
            for _turn in range(1_000):
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for _task in range(100):
                tasks.create_task(spin())

    started_s = time.process_time()
    steps = simulate(1, yields).steps
    plain = steps / (time.process_time() - started_s)
    started_s = time.process_time()
    run = scenario.run(1)
    lasted_s = time.process_time() - started_s
    sys.stdout.write(
        f"\nloop: {plain:,.0f} callbacks/s; scenario: {run.steps / lasted_s:,.0f} callbacks/s, "
        f"{run.virtual_s / lasted_s:,.0f} times real time\n"
    )
    assert plain > 20_000  # a bound for busy machines; an idle one does ten times as much


def test_libraries_draw_the_same_jitter() -> None:
    """The module `random` is seeded within a run, and left as it was after it."""

    async def main(_: World) -> float:
        return random.random()

    before = random.getstate()
    assert simulate(1, main).value == simulate(1, main).value != simulate(2, main).value
    assert random.getstate() == before


def test_each_purpose_has_one_generator() -> None:
    """Generators differ by purpose and by seed; a second one for a purpose is refused."""

    async def main(world: World) -> tuple[float, float]:
        drawn = world.random_for("one").random(), world.random_for("another").random()
        with pytest.raises(ValueError, match="'one' has its generator already"):
            world.random_for("one")
        return drawn

    assert simulate(1, main).value == simulate(1, main).value
    assert len({*simulate(1, main).value, *simulate(2, main).value}) == 4


def test_a_failure_prints_seed_timeline_and_replay(capsys: pytest.CaptureFixture[str]) -> None:
    """What a run that fails prints is enough to see what happened, and to see it again."""

    async def main(world: World) -> None:
        store = world.store_for("writer")
        await world.node("writer").run(write(store.create))
        world.crash("writer")
        raise KeyError("acknowledged write is lost")

    async def write(create: Callable[[str, bytes], Coroutine[Any, Any, object]]) -> None:
        await create("wal/1", b"abc")

    with pytest.raises(KeyError):
        simulate(7, main)
    text = capsys.readouterr().err
    assert "simulation failed: seed 7, virtual time 0.020000 s" in text
    assert "create wal/1 of writer: Created" in text
    assert "wal/1: 3 bytes" in text
    assert "writer    crashes" in text
    assert "replay: " in text
    assert "test_run.py::test_a_failure_prints_seed_timeline_and_replay" in text


def test_an_error_that_nobody_looks_at_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A task that failed unseen fails the run, unless its node has crashed since: then only one
    that was started for nobody to wait for does, as that is noted at once.
    """

    async def fail() -> None:
        raise KeyError("unseen")

    async def spawn(world: World) -> None:
        _ = world.node("a").spawn(fail())
        await world.sleep_ms(1)

    async def spawn_and_crash(world: World) -> None:
        await spawn(world)
        world.crash("a")

    async def start_and_crash(world: World) -> None:
        world.node("a").start(fail())
        await world.sleep_ms(1)
        world.crash("a")

    with pytest.raises(UnhandledErrors, match="a: SimTask exception was never retrieved"):
        simulate(1, spawn)
    assert "unseen" in capsys.readouterr().err
    simulate(1, spawn_and_crash)
    with pytest.raises(UnhandledErrors, match="a: what ran here has failed"):
        simulate(1, start_and_crash)
