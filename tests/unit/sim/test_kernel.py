"""The simulation itself: crashes run no code, requests outlive senders, seeds order tasks."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

from shalekv.clock import LoopClock
from shalekv.store.api import Unknown
from tests.sim.errors import Deadlock, NodeCrashed, UnhandledErrors
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World

sleep_ms = LoopClock().sleep_ms
UNANSWERED = replace(Faults.none(round_trip_ms=20), reset=0.0, timeout_ms=1_000)


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

    async def main(world: World) -> None:
        node = world.node("a")
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


def test_tasks_run_in_the_order_of_the_seed() -> None:
    """Different seeds run ready tasks in different orders; all orders of three are found."""

    async def main(_world: World) -> tuple[int, ...]:
        order: list[int] = []

        async def note(number: int) -> None:
            order.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(note(number))
        return tuple(order)

    assert len({simulate(seed, main).value for seed in range(100)}) == 6


@pytest.mark.parametrize(
    ("faults", "then", "later"),
    [
        (replace(UNANSWERED, lost_request=1.0), [], []),
        (replace(UNANSWERED, lost_reply=1.0), ["wal/1"], ["wal/1"]),
        (replace(UNANSWERED, late_request=1.0), [], ["wal/1"]),
        (replace(UNANSWERED, refused=1.0), [], []),
    ],
)
def test_an_unanswered_create_is_unknown(faults: Faults, then: list[str], later: list[str]) -> None:
    """A create without an answer is `Unknown`, whether it landed, lands a day later, or never."""

    async def main(world: World) -> None:
        assert isinstance(await world.store_for("a").create("wal/1", b"data"), Unknown)
        assert world.store.names("wal/") == then
        await sleep_ms(86_400_000)
        assert world.store.names("wal/") == later

    simulate(1, main, faults=faults)


def test_a_request_of_a_crashed_node_still_lands() -> None:
    """What was sent before the crash is applied after it."""

    async def main(world: World) -> None:
        node = world.node("a")
        node.start(world.store_for(node).create("wal/1", b"data"))
        await sleep_ms(1)
        node.crash()
        assert world.store.names("wal/") == []
        await sleep_ms(1_000)
        assert world.store.names("wal/") == ["wal/1"]

    simulate(1, main, faults=Faults.none(round_trip_ms=20))


def test_a_paused_node_stands_still() -> None:
    """Nothing of a paused node runs until the pause ends."""

    async def main(world: World) -> None:
        ran: list[float] = []

        async def work() -> None:
            await sleep_ms(10)
            ran.append(world.now_ms)

        node = world.node("a")
        node.start(work())
        await sleep_ms(1)
        node.pause(5_000)
        await sleep_ms(10_000)
        assert ran == [5_001]

    simulate(1, main)


def test_a_run_that_can_not_end_fails() -> None:
    """A deadlock is raised, and tells where the task waits."""

    async def main(_world: World) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"Event\.wait"):
        simulate(1, main)


def test_an_error_that_nobody_looks_at_fails_the_run() -> None:
    """A background task that failed unseen fails the run."""

    async def main(world: World) -> None:
        async def fail() -> None:
            raise KeyError("unseen")

        world.node("a").start(fail())
        await sleep_ms(10)

    with pytest.raises(UnhandledErrors, match="unseen"):
        simulate(1, main)
