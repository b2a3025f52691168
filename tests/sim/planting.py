"""Planting bugs into the shipped code, and seeing whether the simulation notices."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import pytest

from tests.sim.invariants import check_all
from tests.sim.run import simulate
from tests.sim.stored import Stored
from tests.sim.workload import rival_writers
from tests.sim.world import World

SEEDS_MAX = 60
Main: TypeAlias = Callable[[World], Coroutine[Any, Any, object]]

Patch: TypeAlias = tuple[
    object, str, object
]  # a module or class, a name in it, and what it becomes


async def only_writers(world: World) -> None:
    """Rival writers, and all that can be checked of them."""
    cluster = await rival_writers(world)
    check_all(cluster.history, Stored.read(world.store))


def first_failure(
    patches: Sequence[Patch],
    monkeypatch: pytest.MonkeyPatch,
    main: Main = only_writers,
    *,
    seeds: int = SEEDS_MAX,
) -> int | None:
    """The first seed that fails with the bug planted; None: so many do not notice it."""
    for owner, name, wrong in patches:
        monkeypatch.setattr(owner, name, wrong)
    return next((seed for seed in range(seeds) if failure(seed, main) is not None), None)


def failure(seed: int, main: Main = only_writers) -> Exception | None:
    """Why the run with this seed fails, if it does."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            simulate(seed, main)
        except Exception as error:  # noqa: BLE001 - a violation, a deadlock, or whatever it led to
            return error
    return None
