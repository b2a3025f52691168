"""Measures several ways to do one thing in turns, so that a busy machine slows all of them alike.

Only ratios within a round mean anything.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

Way = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one run. `cpu_s` is of this process and of children that have ended."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of each way, round by round."""

    by_way: Mapping[str, list[Cost]]

    def wall_s(self, way: str) -> float:
        return statistics.median(cost.wall_s for cost in self.by_way[way])

    def cpu_s(self, way: str) -> float:
        return statistics.median(cost.cpu_s for cost in self.by_way[way])

    def speed(self, way: str, beside: str) -> str:
        """The speed of `way` in units of `beside`: the median of the rounds and the quartiles."""
        return _shown(other.wall_s / own.wall_s for own, other in self._pairs(way, beside))

    def latency(self, way: str, beside: str) -> str:
        return _shown(own.wall_s / other.wall_s for own, other in self._pairs(way, beside))

    def cpu(self, way: str, beside: str) -> str:
        """The processor time of `way` in units of that of `beside`, likewise."""
        return _shown(own.cpu_s / other.cpu_s for own, other in self._pairs(way, beside))

    def _pairs(self, way: str, beside: str) -> list[tuple[Cost, Cost]]:
        return list(zip(self.by_way[way], self.by_way[beside], strict=True))


async def measured(ways: Mapping[str, Way], rounds: int, tidy: Way | None = None) -> Costs:
    """The costs of `ways`, in an order that turns round each time; `tidy` runs after each way.

    Each runs twice in a row, and the second time counts: the first brings connections, caches and
    free memory into the state in which this way leaves them.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            for is_counted in (False, True):
                began_cpu_s, began_s = _cpu_s(), time.perf_counter()
                await ways[name]()
                cost = Cost(time.perf_counter() - began_s, _cpu_s() - began_cpu_s)
                if is_counted:
                    costs[name].append(cost)
                if tidy is not None:
                    await tidy()
    return Costs(costs)


async def at_once(count: int, concurrency: int, work: Callable[[int], Awaitable[object]]) -> None:
    """Do `work` with the numbers below `count`, `parallel` at a time."""
    waiting = iter(range(count))

    async def some() -> None:
        for number in waiting:  # shared by all tasks
            await work(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(some())


def load() -> str:
    """Describe the load of the machine in the last minute."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"


def _cpu_s() -> float:
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _shown(ratios: Iterator[float]) -> str:
    lower, middle, upper = statistics.quantiles(ratios, method="inclusive")
    return f"{middle:5.2f} ({lower:.2f} to {upper:.2f})"
