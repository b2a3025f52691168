"""Fixtures of the tests of compaction."""

from __future__ import annotations

import pytest

from tests.kit.constants import set_constants
from tests.unit.protocol.compaction.driven import SMALL_CONSTANTS


@pytest.fixture
def small_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few entries fill many levels, and exceed what one merge reads."""
    set_constants(monkeypatch, SMALL_CONSTANTS)
