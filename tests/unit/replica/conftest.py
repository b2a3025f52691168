"""Replicas in these tests poll whenever a read requires it, without a least time between polls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.constants import constants


@pytest.fixture(autouse=True)
def _polls_at_once() -> Iterator[None]:
    with constants({"shalekv.replica.progress:POLL_INTERVAL_MIN_MS": 0}):
        yield
