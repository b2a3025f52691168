"""Planting bugs into the shipped code, and seeing whether the simulation notices."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import TypeAlias

import pytest

from tests.sim.invariants import check_all
from tests.sim.run import simulate
from tests.sim.stored import Stored
from tests.sim.workload import rival_writers
from tests.sim.world import World

SEEDS_MAX = 60

Patch: TypeAlias = tuple[
    object, str, object
]  # a module or class, a name in it, and what it becomes


def first_failure(patches: Sequence[Patch], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The first seed that fails with the bug planted; None: `SEEDS_MAX` seeds do not notice it."""
    for owner, name, wrong in patches:
        monkeypatch.setattr(owner, name, wrong)
    return next((seed for seed in range(SEEDS_MAX) if failure(seed) is not None), None)


def failure(seed: int) -> Exception | None:
    """Why the run with this seed fails, if it does."""

    async def main(world: World) -> None:
        cluster = await rival_writers(world)
        check_all(cluster.history, Stored.read(world.store))

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            simulate(seed, main)
        except Exception as error:  # noqa: BLE001 - a violation, a deadlock, or whatever it led to
            return error
    return None
