"""What the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.processes.processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes for a test and ends them with it."""
    with Processes() as started:
        yield started
