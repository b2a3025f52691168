"""State that a command sets up for its process ends with the test that ran it in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    """A command configures the logs of the whole process."""
    yield
    structlog.reset_defaults()
