"""A crash is a power cut: nothing of the node runs any more, and others are told."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from shalekv.clock import LoopClock
from tests.sim.errors import NodeCrashed, SimulationError
from tests.sim.run import simulate
from tests.sim.world import World

Main = Callable[[World], Coroutine[Any, Any, None]]

sleep_ms = LoopClock().sleep_ms


def run(main: Main) -> None:
    """Run `main` with some seeds."""
    for seed in range(20):
        simulate(seed, main)


def test_a_crash_runs_no_code_of_the_node() -> None:
    """After a crash no `finally`, no `except`, no callback and no timer of the node runs."""
    ran: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ran.append("generator")

    async def wait() -> None:
        try:
            async with asyncio.timeout(1):
                async for _ in numbers():
                    await asyncio.Event().wait()
        except BaseException as error:
            ran.append(repr(error))
            raise
        finally:
            ran.append("finally")

    async def process() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, ran.append, "timer")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(wait())

    async def main(world: World) -> None:
        ran.clear()
        node = world.node("a")
        waiting = node.spawn(process())
        await sleep_ms(200)
        node.spawn(wait()).add_done_callback(lambda _: None)  # ready, and never to run
        node.crash()
        waiting.cancel()
        await sleep_ms(10_000)
        gc.collect()
        assert ran == []

    run(main)


def test_what_outlives_the_run_is_ended_in_silence() -> None:
    """Coroutines that wait when the run ends are closed after it, whatever they do then."""
    ran: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ran.append("finally")
            try:
                await sleep_ms(1)
            finally:
                asyncio.get_running_loop()  # raises: there is none any more

    async def process() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stubborn())
            tasks.create_task(stubborn())

    async def main(world: World) -> None:
        for name in "ab":
            world.node(name).start(process())
        await sleep_ms(1)
        world.crash("a")
        world.pause("a")
        world.node("a").start(process())  # never starts
        assert ran == []

    simulate(1, main)
    assert ran == ["finally"] * 4
    gc.collect()


def test_callers_of_a_crashed_node_are_told() -> None:
    """A call to a node that crashes raises at once, and so does one to a crashed node."""

    async def serve() -> None:
        await sleep_ms(1_000)

    async def main(world: World) -> None:
        node = world.node("a")

        async def call() -> None:
            with pytest.raises(NodeCrashed, match="a has crashed"):
                await node.run(serve())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(call())
            await sleep_ms(10)
            world.crash(node)
        assert world.now_ms == 10
        with pytest.raises(NodeCrashed):
            await node.run(serve())

    run(main)


def test_a_restarted_node_is_another_process() -> None:
    """After a crash the name stands for a new process, with new randomness and the old clock."""

    async def main(world: World) -> None:
        first = world.node("a")
        assert world.node("a") is first
        runtime = world.runtime_for(first)
        assert world.runtime_for("a") is runtime
        world.crash("a")
        world.crash("a")  # nobody is there
        second = world.node("a")
        again = world.runtime_for(second)
        assert (first.label, second.label, second.alive) == ("a", "a/2", True)
        assert world.nodes() == [second]
        assert again.random.random() != runtime.random.random()
        assert again.clock is runtime.clock

    simulate(1, main)


def test_a_crash_ends_a_pause() -> None:
    """A node that crashes while it is paused never runs again, resumed or not."""

    async def main(world: World) -> None:
        ran: list[int] = []

        async def work() -> None:
            ran.append(1)

        node = world.node("a")
        node.pause(100)
        node.start(work())
        await sleep_ms(10)
        node.crash()
        node.resume()
        await sleep_ms(1_000)
        assert ran == []

    run(main)


def test_a_process_ends_itself() -> None:
    """After `exit` the rest of the process is gone, and those who called it are told."""

    async def main(world: World) -> None:
        ran: list[str] = []
        node = world.node("a")

        async def background() -> None:
            try:
                await sleep_ms(50)
            finally:
                ran.append("background")

        async def process() -> None:
            await sleep_ms(10)
            node.exit()
            ran.append("same step")

        async def call() -> None:
            with pytest.raises(NodeCrashed):
                await node.run(background())

        assert not node.started
        node.start(background())
        node.start(process())
        await call()
        await sleep_ms(1_000)
        assert ran == ["same step"]
        assert (node.started, world.find("a")) == (True, None)
        assert world.node("a") is world.find("a") is not node

    run(main)


def test_a_node_does_not_crash_itself() -> None:
    """A crash from within would let the current step go on, and is refused."""

    async def main(world: World) -> None:
        node = world.node("a")

        async def crash() -> None:
            node.crash()

        with pytest.raises(SimulationError, match="a cannot crash itself"):
            await node.run(crash())
        assert node.alive

    simulate(1, main)
