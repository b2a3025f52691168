"""A runtime without threads and without waiting, for tests of what runs on one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any, TypeVar, TypeVarTuple

from shalekv.clock import Clock, MachineClock
from shalekv.runtime import Runtime

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class InlineWorkers:
    """Workers that do the work at once, where they are asked."""

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return function(*args)


class InlineClock:
    """A clock that jumps to the end of every wait, and notes how long each was."""

    def __init__(self) -> None:
        self.waits_ms: list[float] = []

    def monotonic_ms(self) -> float:
        return sum(self.waits_ms)

    def wall_ms(self) -> int | None:
        return None

    async def sleep_ms(self, duration_ms: float) -> None:
        self.waits_ms.append(duration_ms)


class MovedClock(MachineClock):
    """The clock of the machine, which a test moves on."""

    ahead_ms = 0.0

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.ahead_ms

    def wall_ms(self) -> int | None:
        return int((super().wall_ms() or 0) + self.ahead_ms)


def inline_runtime(seed: int | str = 0, clock: Clock | None = None) -> Runtime:
    """A runtime on which the same seed does the same."""
    return Runtime(clock or InlineClock(), Random(seed), InlineWorkers())


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the coroutine waits")


async def gathered(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]
