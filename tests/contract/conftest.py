"""Lets the asserts of the contract say what they compared; opens the stores that it is for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.contract.store_contract")

from tests.contract.opening import OpenStore, opener  # noqa: E402  (see above)


@pytest.fixture
def open_store(kind: str, request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Opens one and the same new database; a module says on which `kind` of store."""
    yield from opener(kind, request)
