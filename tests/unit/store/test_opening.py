"""Warnings about a store when it is opened."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from tests.kit.inline_runtime import inline_runtime


@pytest.mark.parametrize(
    ("endpoint", "is_warned"),
    [
        ("http://minio:9000", True),
        ("http://192.0.2.1:9000", True),
        ("http://127.0.0.1:9000", False),
        ("http://[::1]:9000", False),
        ("http://localhost", False),
        ("https://minio:9000", False),
    ],
)
async def test_a_store_without_tls_on_another_machine_is_warned_of(
    endpoint: str, *, is_warned: bool
) -> None:
    """The warning comes once, and is only of what the network can read."""
    settings = StoreSettings(endpoint_url=endpoint, anonymous=True)
    with capture_logs() as logged:
        for _ in range(2):
            await open_store("s3://bucket/db", inline_runtime(), settings).close()
    assert [line["log_level"] for line in logged] == ["warning"] * is_warned
