"""Tests that run in virtual time: waiting takes none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.simulation import Simulation

P = ParamSpec("P")


def virtual_time(
    orders: int = 1, *, seed: int = 0
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Run a test in virtual time, in `orders` different orders of the tasks that are ready."""

    def decorated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            for each in range(seed, seed + orders):
                simulate(each, lambda _: test(*args, **kwargs))

        return run

    return decorated


def with_simulation(
    orders: int = 1, *, seed: int = 0, faults: Faults | None = None
) -> Callable[[Callable[Concatenate[Simulation, P], Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Run a test in virtual time, as `virtual_time` does; its first argument is the simulation."""

    def decorated(
        test: Callable[Concatenate[Simulation, P], Coroutine[Any, Any, None]],
    ) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            for each in range(seed, seed + orders):
                simulate(each, lambda sim: test(sim, *args, **kwargs), faults=faults)

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorated
