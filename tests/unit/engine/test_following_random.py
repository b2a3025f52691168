"""I6 at random: what replicas show while they are stopped, and lose what protects them."""

from __future__ import annotations

import pytest

from tests.kit.engine.replication import replicate
from tests.sim.run import simulate


@pytest.mark.parametrize("seed", range(8))
def test_replicas_show_prefixes_of_the_log_whatever_stops_them(seed: int) -> None:
    """Every reply is right, or says that it is none."""
    assert simulate(seed, replicate).value > 100
