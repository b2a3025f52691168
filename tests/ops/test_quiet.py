"""Ordinary load fires no alert."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kit.processes.processes import Processes
from tests.ops.quiet import quiet

MINUTES = float(os.environ.get("ALERTS_QUIET_MINUTES", "60"))


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 900)
async def test_ordinary_load_fires_no_alert(processes: Processes, tmp_path: Path) -> None:
    """For an hour, by the rules as they are."""
    fired = await quiet(processes, tmp_path, 60 * MINUTES, speed=1)
    assert [each.annotations for each in fired.values()] == []
