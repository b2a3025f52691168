"""Databases on the kinds of stores that the contract is for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract import conftest as contract
from tests.contract.opening import OpenStore
from tests.kit.household import Household
from tests.kit.processes.in_process import real_runtime

HTTP_TICK_MS = 2_000  # HTTP tells whole seconds
open_store = contract.open_store  # a fixture


@pytest.fixture
async def it(kind: str, open_store: OpenStore) -> AsyncIterator[Household]:
    """What opens the roles of this database, which is there."""
    with real_runtime() as runtime:
        household = Household(open_store, runtime, 10 if kind == "file" else HTTP_TICK_MS)
        try:
            await household.create()
            yield household
        finally:
            await household.close()
