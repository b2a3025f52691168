"""Measures several ways to do one thing in turns, so that a busy machine slows all of them alike.

Only ratios within a round mean anything; the first round warms up and is not counted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

Way = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run took. `cpu_s` is of this process and of children that have ended."""

    wall_s: float
    cpu_s: float


async def nothing() -> None:
    """Does it."""


async def measured(ways: Mapping[str, Way], rounds: int, tidy: Way = nothing) -> Costs:
    """The costs of `ways`, in an order that turns round each time; `tidy` runs after each."""
    costs = Costs({name: [] for name in ways})
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            cost = await _cost(ways[name])
            await tidy()
            if number > 0:
                costs.by_way[name].append(cost)
    return costs


async def _cost(way: Way) -> Cost:
    began_cpu_s, began_s = _cpu_s(), time.perf_counter()
    await way()
    return Cost(time.perf_counter() - began_s, _cpu_s() - began_cpu_s)


def _cpu_s() -> float:
    # Not all fields of `times`: the last is the time of the day.
    return sum(os.times()[:4])


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of each way, round by round."""

    by_way: dict[str, list[Cost]]

    def wall_s(self, way: str) -> float:
        """The median duration of one run."""
        return statistics.median(cost.wall_s for cost in self.by_way[way])

    def cpu_s(self, way: str) -> float:
        """The median processor time of one run."""
        return statistics.median(cost.cpu_s for cost in self.by_way[way])

    def speed(self, way: str, beside: str) -> str:
        """How fast `way` was in units of `beside`: the median of the rounds, and their quartiles."""
        pairs = zip(self.by_way[way], self.by_way[beside], strict=True)
        ratios = [other.wall_s / own.wall_s for own, other in pairs]
        lower, middle, upper = statistics.quantiles(ratios, method="inclusive")
        return f"{middle:5.2f} ({lower:.2f} to {upper:.2f})"


def load() -> str:
    """How busy the machine was in the last minute."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"


def in_turns(count: int, concurrency: int, work: Callable[[int], Awaitable[object]]) -> Way:
    """A way that does `work` with the numbers below `count`, so many at once."""
    return partial(_in_turns, count, concurrency, work)


async def _in_turns(
    count: int, concurrency: int, work: Callable[[int], Awaitable[object]]
) -> None: ...
