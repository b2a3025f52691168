"""What the tests of linearizability share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.processes.processes import Processes
from tests.linearizability import porcupine


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes for a test and ends them with it."""
    with Processes() as started:
        yield started


@pytest.fixture(scope="session")
def porcupine_program() -> Path:
    """Porcupine, built, which takes Go."""
    return porcupine.build()
