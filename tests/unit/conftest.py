"""State that a command sets up for its process ends with the test that ran it in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    """A command configures the logs of the whole process."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    structlog.reset_defaults()
    logging.captureWarnings(capture=False)
    root.setLevel(level)
    root.handlers[:] = handlers
