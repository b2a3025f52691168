"""A history of two writers that the tests of checkers begin with."""

from __future__ import annotations

import pytest

from tests.unit.sim.histories import DONE, Past, attempted


@pytest.fixture
def past() -> Past:
    """Key a is v1 since 2 ms, acknowledged at 3 ms, and v2 by a newer writer since 6 ms,
    acknowledged at 7 ms.
    """
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=DONE)
    second = past.put(b"a")
    attempted(second, 5_000, 7_000, seq=past.landed(6_000, epoch=2, a="v2"), answer=DONE, epoch=2)
    return past
