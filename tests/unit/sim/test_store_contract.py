"""The simulated store keeps the contract of object stores, in virtual time, under any latency."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import pytest

from tests.contract.store_contract import StoreContract
from tests.sim.faults import Faults, Span
from tests.sim.run import simulate
from tests.sim.simulation import Simulation

UNEVEN = Faults(request_ms=Span(0.1, 1_000), reply_ms=Span(0.1, 1_000), page_names=900)


class TestSimStore(StoreContract):
    """Each test of the contract runs inside a simulation, which opens the stores that it asks for.

    The fixtures only make their names known; see `simulated`.
    """

    @pytest.fixture
    def open_store(self) -> None:
        """Replaced inside the simulation."""

    @pytest.fixture
    def store(self) -> None:
        """Replaced inside the simulation."""

    @pytest.fixture
    def rival(self) -> None:
        """Replaced inside the simulation."""


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The same test as a function that runs it on a simulated loop."""

    @functools.wraps(test)
    def run(self: TestSimStore, **arguments: Any) -> None:
        async def main(sim: Simulation) -> None:
            numbers = count()
            opened = {
                "store": sim.store_for("a"),
                "rival": sim.store_for("b"),
                "open_store": lambda: sim.store_for(f"node-{next(numbers)}"),
            }
            await test(self, **{name: opened.get(name, arguments[name]) for name in arguments})

        for seed in (1, 2):
            simulate(seed, main, faults=UNEVEN)

    return run


for _name, _test in inspect.getmembers(StoreContract, inspect.iscoroutinefunction):
    if _name.startswith("test_"):
        setattr(TestSimStore, _name, simulated(_test))
