"""The environment of tests of Google and Azure."""

from __future__ import annotations

import os

import pytest

AZURE_KEY = "c2VjcmV0LWtleS1vZi10aGUtYWNjb3VudA=="


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the tester's credentials: obstore reads the environment when a store is opened."""
    for name in os.environ:
        if name.startswith(("AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def azure_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a user of Azure with the key of an account."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
