"""A pause of the process fills no bucket of these tests: no time of their loop passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.kit.steady_loop import SteadyLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], SteadyLoop]]:
    """The only loop of the tests of this folder."""
    return {"steady": SteadyLoop}
