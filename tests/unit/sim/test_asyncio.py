"""What asyncio offers, and tenacity on top of it, works on the simulated loop under every seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

import pytest
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from shalekv.clock import LoopClock
from tests.sim.clocks import NodeClock
from tests.sim.loop import SimLoop

Main = Callable[[], Coroutine[Any, Any, None]]

sleep_ms = LoopClock().sleep_ms


def now_s() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()


def run(main: Main) -> None:
    """Run `main` with some seeds."""
    for seed in range(25):
        with closing(SimLoop(seed)) as loop:
            loop.run_until_complete(main())
            loop.let_go()
            assert loop.unhandled == []


def test_task_group() -> None:
    """One failure cancels the others, waits for them, and is raised in a group."""

    async def main() -> None:
        cancelled: list[int] = []

        async def wait(number: int) -> None:
            try:
                await sleep_ms(10_000)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        async def fail() -> None:
            await sleep_ms(5)
            raise KeyError

        async def together() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(5):
                    tasks.create_task(wait(number))
                tasks.create_task(fail())

        with pytest.raises(ExceptionGroup) as caught:
            await together()
        assert [type(error) for error in caught.value.exceptions] == [KeyError]
        assert sorted(cancelled) == [0, 1, 2, 3, 4]
        assert now_s() == 0.005

    run(main)


def test_timeout_and_wait_for() -> None:
    """Both end a wait at their time, and neither ends one that was quicker."""

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await sleep_ms(2_000)
        assert now_s() == 1.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sleep_ms(2_000), 0.5)
        assert now_s() == 1.5
        async with asyncio.timeout(1):
            await sleep_ms(500)
        await asyncio.wait_for(sleep_ms(500), 1)
        assert now_s() == 2.5

    run(main)


def test_queue() -> None:
    """A bounded queue hands everything over once, in order, and blocks its producers."""

    async def main() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(2)
        got: list[int] = []

        async def produce() -> None:
            for number in range(20):
                await queue.put(number)

        async def consume() -> None:
            for _ in range(20):
                got.append(await queue.get())
                assert queue.qsize() <= 2
                queue.task_done()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            tasks.create_task(consume())
        await queue.join()
        assert got == list(range(20))

    run(main)


def test_event_condition_lock_and_semaphore() -> None:
    """The primitives wake whom they should, and exclude whom they should."""

    async def main() -> None:
        event, condition, limit = asyncio.Event(), asyncio.Condition(), asyncio.Semaphore(2)
        lock = asyncio.Lock()
        inside: list[int] = []
        most: list[int] = []
        ready: list[int] = []

        async def work(number: int) -> None:
            await event.wait()
            async with limit:
                inside.append(number)
                most.append(len(inside))
                await sleep_ms(1)
                inside.remove(number)
            async with lock:
                await asyncio.sleep(0)
            async with condition:
                ready.append(number)
                condition.notify_all()

        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(work(number))
            event.set()
            async with condition:
                await condition.wait_for(lambda: len(ready) == 6)
        assert max(most) == 2

    run(main)


def test_gather_shield_wait_and_as_completed() -> None:
    """Results come back in the order of the arguments, or of their completion."""

    async def after(duration_ms: float) -> float:
        await sleep_ms(duration_ms)
        return duration_ms

    async def fail() -> None:
        raise KeyError

    async def main() -> None:
        assert list(await asyncio.gather(after(3), after(1), after(2))) == [3, 1, 2]
        failed = await asyncio.gather(after(1), fail(), return_exceptions=True)
        assert isinstance(failed[1], KeyError)
        in_order = [await each for each in asyncio.as_completed([after(3), after(1), after(2)])]
        assert in_order == [1, 2, 3]
        loop = asyncio.get_running_loop()
        waiting = {loop.create_task(after(duration_ms)) for duration_ms in (5, 50)}
        done, pending = await asyncio.wait(waiting, timeout=0.01)
        assert [task.result() for task in done] == [5]
        inner = pending.pop()
        outer = asyncio.shield(inner)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert await inner == 50

    run(main)


def test_cancellation() -> None:
    """A cancelled task runs its `finally`, may wait in it, and reports that it was cancelled."""

    async def main() -> None:
        log: list[str] = []

        async def work() -> None:
            try:
                await sleep_ms(1_000)
            finally:
                log.append("cleaning up")
                await sleep_ms(1)
                log.append("clean")

        task = asyncio.get_running_loop().create_task(work())
        await sleep_ms(1)
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["cleaning up", "clean"]
        assert task.cancelled()
        assert now_s() == 0.002

    run(main)


def test_tenacity_waits_on_a_virtual_clock() -> None:
    """Retries back off in virtual time, and end when the clock has passed their deadline."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        clock = NodeClock(loop, offset_ms=123.0)
        started_ms = clock.monotonic_ms()
        attempts: list[float] = []

        def deadline_passed(_: RetryCallState) -> bool:
            return clock.monotonic_ms() - started_ms >= 10_000

        async def sleep(seconds: float) -> None:
            await clock.sleep_ms(seconds * 1000)

        retrying = AsyncRetrying(
            sleep=sleep,
            wait=wait_exponential(multiplier=1),
            stop=deadline_passed,
            retry=retry_if_exception_type(KeyError),
            reraise=True,
        )

        async def fail() -> None:
            attempts.append(loop.time())
            raise KeyError

        with pytest.raises(KeyError):
            await retrying(fail)
        assert attempts == [0, 1, 3, 7, 15]

    run(main)
