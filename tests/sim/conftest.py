"""Seeds for simulation tests.

A test that takes `seed` runs once per seed, 20 by default; ``@pytest.mark.seeds(200)`` asks for
another number. ``--sim-seed N`` runs every such test with that seed only, ``--sim-seeds N`` with
that many.
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
    config.addinivalue_line("markers", "seeds(count): how many seeds a simulation test runs with")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per seed."""
    if "seed" not in metafunc.fixturenames:
        return
    # The options are unknown when this file was found too late to add them.
    seed = metafunc.config.getoption("sim_seed", None)
    count = metafunc.config.getoption("sim_seeds", None)
    if count is None:
        mark = metafunc.definition.get_closest_marker("seeds")
        count = mark.args[0] if mark else SEEDS
    seeds = range(count) if seed is None else [seed]
    metafunc.parametrize("seed", seeds, ids=[f"seed{each}" for each in seeds])
