"""The environment of tests of Google and Azure."""

from __future__ import annotations

import pytest

from tests.unit.store.obstores.opened import AZURE_KEY


@pytest.fixture
def azure_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of somebody who uses Azure with the key of an account."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
