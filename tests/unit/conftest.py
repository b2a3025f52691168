"""What a command has set up for its process ends with the test that ran it in this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    """Loggers are cached by their first use under a command's configuration, for good."""
    yield
    structlog.reset_defaults()
