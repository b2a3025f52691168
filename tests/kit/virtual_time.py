"""Tests that run in virtual time: waiting takes none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from tests.sim.run import simulate
from tests.sim.world import World

P = ParamSpec("P")


def virtual_time(
    orders: int = 1, *, seed: int = 0
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Run a test in virtual time, in so many orders of the tasks that are ready."""

    def decorated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            async def in_world(_: World) -> None:
                await test(*args, **kwargs)

            for each in range(seed, seed + orders):
                simulate(each, in_world)

        return run

    return decorated
