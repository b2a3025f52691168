"""Seeds for simulation tests.

A test that takes `seed` runs once per seed, 20 by default; ``@pytest.mark.seeds(200)`` asks for
another number, ``@pytest.mark.seeds(200, first=1_000)`` for others than those from 0 on.
``--sim-seed N`` runs every such test with that seed only, ``--sim-seeds N`` with that many.
"""

from __future__ import annotations

import pytest

SEEDS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options to the command line."""
    group = parser.getgroup("simulation")
    group.addoption("--sim-seed", type=int, default=None, help="run with this seed only")
    group.addoption("--sim-seeds", type=int, default=None, help="run with this many seeds")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    text = "seeds(count, first=0): the seeds that a simulation test runs with"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per seed."""
    if "seed" not in metafunc.fixturenames:
        return
    # The options are unknown when this file was found too late to add them.
    seed = metafunc.config.getoption("sim_seed", None)
    count = metafunc.config.getoption("sim_seeds", None)
    mark = metafunc.definition.get_closest_marker("seeds")
    if count is None:
        count = mark.args[0] if mark else SEEDS
    first = mark.kwargs.get("first", 0) if mark else 0
    seeds = range(first, first + count) if seed is None else [seed]
    metafunc.parametrize("seed", seeds, ids=[f"seed{each}" for each in seeds])
