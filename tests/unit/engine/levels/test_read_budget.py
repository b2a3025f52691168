"""The read budget bounds the bytes in flight, in the order of arrival, whoever is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.engine.levels.read_budget import ReadBudget
from tests.kit.engine.running_log import quiesce
from tests.kit.seeds import random_of


class Requests:
    """Requests that end when the test says so."""

    def __init__(self, budget: ReadBudget) -> None:
        self.budget = budget
        self.running: dict[str, asyncio.Event] = {}
        self.order: list[str] = []

    async def request(self, name: str, size_bytes: int) -> None:
        async with self.budget.room(size_bytes):
            end = self.running[name] = asyncio.Event()
            self.order.append(name)
            try:
                await end.wait()
            finally:
                del self.running[name]

    async def end(self, name: str) -> None:
        self.running[name].set()
        await quiesce()


async def test_first_come_first_served() -> None:
    """Past the bound requests wait, and small ones do not overtake a large one."""
    requests = Requests(ReadBudget(10))
    async with asyncio.TaskGroup() as tasks:
        for name, size_bytes in [("a", 6), ("b", 4), ("c", 7), ("d", 1), ("e", 3)]:
            tasks.create_task(requests.request(name, size_bytes))
        await quiesce()
        assert requests.order == ["a", "b"]
        assert (requests.budget.in_flight_bytes, requests.budget.waiting_count) == (10, 3)
        await requests.end("b")
        assert requests.order == ["a", "b"]
        await requests.end("a")
        assert requests.order == ["a", "b", "c", "d"]
        await requests.end("d")
        assert requests.order[-1] == "e"
        await requests.end("c")
        await requests.end("e")
    assert (requests.budget.in_flight_bytes, requests.budget.in_flight_bytes_peak) == (0, 10)


@pytest.mark.parametrize("number", range(10))
async def test_any_cancellations(number: int) -> None:
    """Whatever is cancelled when, the bound holds, nobody is forgotten, and all is given back."""
    random = random_of(f"read budget {number}")
    budget = ReadBudget(10)
    in_flight: list[int] = []
    waiting_ends: list[asyncio.Event] = []

    async def request(size_bytes: int) -> None:
        end = asyncio.Event()
        async with budget.room(size_bytes):
            in_flight.append(size_bytes)
            assert budget.in_flight_bytes >= sum(in_flight)
            assert sum(in_flight) <= 10 or len(in_flight) == 1
            waiting_ends.append(end)
            try:
                await end.wait()
            finally:
                in_flight.remove(size_bytes)

    async with asyncio.TaskGroup() as tasks:
        calls: list[asyncio.Task[None]] = []
        for _ in range(200):
            choice = random.random()
            if choice < 0.5:
                calls.append(tasks.create_task(request(random.choice([1, 3, 7, 12]))))
            elif choice < 0.7 and calls:
                random.choice(calls).cancel()
            elif waiting_ends:
                waiting_ends.pop(random.randrange(len(waiting_ends))).set()
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
        while not all(call.done() for call in calls):
            while waiting_ends:
                waiting_ends.pop().set()
            await asyncio.sleep(0)
    assert (budget.in_flight_bytes, budget.waiting_count) == (0, 0)
