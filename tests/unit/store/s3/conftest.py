"""Credentials for tests, which no message may show."""

from __future__ import annotations

import pytest

from tests.kit.s3.opening import forget_aws

ACCESS_KEY = "AKIASENTINELACCESSKEY"
SECRET_KEY = "sentinel/secret+key/0123456789abcdefghij"
TOKEN = "sentinelSessionToken0123456789"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with these credentials, and nothing of the machine's own."""
    forget_aws(monkeypatch)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
