"""I6 at random: what replicas of a quorum database show while everything around them breaks."""

from __future__ import annotations

import pytest

from tests.sim.run import simulate
from tests.unit.engine.tailing.replication import replicate


@pytest.mark.parametrize("seed", range(8))
def test_replicas_show_prefixes_of_the_log_whatever_breaks(seed: int) -> None:
    """Every reply is right, or says that it is none."""
    assert simulate(seed, replicate).value > 100
