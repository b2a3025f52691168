"""The stores that the contract is for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.opening import OpenStore, opener


@pytest.fixture
def open_store(kind: str, request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Opens one and the same new database; a module says on which `kind` of store."""
    yield from opener(kind, request)
