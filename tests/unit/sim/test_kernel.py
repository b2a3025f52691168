"""The simulation itself: a crash runs no code, and no run hangs, or fails unseen."""

from __future__ import annotations

import asyncio
import gc

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import Stopping
from tests.sim.errors import Deadlock, NodeCrashed, UnhandledErrors
from tests.sim.run import Failure, attempt, simulate
from tests.sim.simulation import Simulation

sleep_ms = LoopClock().sleep_ms


@pytest.mark.parametrize("seed", range(5))
def test_a_crash_runs_no_code_of_the_node(seed: int) -> None:
    """After a crash no `finally`, `except`, callback or timer of the node runs; callers fail."""
    ran: list[str] = []

    async def wait() -> None:
        try:
            async with asyncio.timeout(1):
                await asyncio.Event().wait()
        except BaseException as error:
            ran.append(repr(error))
            raise
        finally:
            ran.append("finally")

    async def process() -> None:
        asyncio.get_running_loop().call_later(0.3, ran.append, "timer")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(wait())

    async def main(sim: Simulation) -> None:
        node = sim.node("a")
        waiting = node.spawn(process())
        await sleep_ms(200)
        node.spawn(wait()).add_done_callback(lambda _: None)  # ready, and never to run
        node.crash()
        waiting.cancel()
        await sleep_ms(10_000)
        gc.collect()
        assert ran == []
        with pytest.raises(NodeCrashed):
            await node.run(wait())

    simulate(seed, main)


def test_a_run_that_can_not_end_fails() -> None:
    """A deadlock is raised, and names the place where the task waits."""

    async def main(_sim: Simulation) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"Event\.wait"):
        simulate(1, main)


@pytest.mark.parametrize("comes_after_ms", [0, 10])
def test_a_bug_behind_a_call_that_was_given_up_fails_the_run(comes_after_ms: int) -> None:
    """Errors that a caller expects are not reported once it has given up; all others are."""

    async def main(sim: Simulation) -> None:
        async def fail(error: Exception) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await sleep_ms(comes_after_ms)
                raise error

        for error in (Stopping("expected"), TimeoutError("expected"), KeyError("a bug")):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await sim.node("a").run(fail(error))
        await sleep_ms(100)

    with pytest.raises(UnhandledErrors, match="a bug") as caught:
        simulate(1, main)
    assert "expected" not in str(caught.value)


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_bug_is_reported_once_whenever_its_caller_gives_up(steps: int) -> None:
    """The error of what has begun reaches its caller, or fails the run."""
    began: list[bool] = []
    reached: list[BaseException] = []

    async def fail() -> None:
        began.append(True)
        raise KeyError("a bug")

    async def main(sim: Simulation) -> None:
        calling = asyncio.create_task(sim.node("a").run(fail()))
        for _ in range(steps):
            await asyncio.sleep(0)
        calling.cancel()
        try:
            await calling
        except (asyncio.CancelledError, KeyError) as error:
            reached.extend([error] * isinstance(error, KeyError))
        await sleep_ms(1)

    outcome = attempt(1, main)
    reported = str(outcome.error).count("a bug") if isinstance(outcome, Failure) else 0
    assert reported + len(reached) == len(began)


def test_an_error_that_nobody_looks_at_fails_the_run() -> None:
    """A background task that failed unseen fails the run."""

    async def main(sim: Simulation) -> None:
        async def fail() -> None:
            raise KeyError("unseen")

        sim.node("a").start(fail())
        await sleep_ms(10)

    with pytest.raises(UnhandledErrors, match="unseen"):
        simulate(1, main)
