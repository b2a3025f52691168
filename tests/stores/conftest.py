"""A pause of the process ends no lease of these tests: no time of their loop passes."""

from __future__ import annotations

from tests.kit.steady_loop import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
