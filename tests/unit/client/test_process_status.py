"""The status of readers, watches and calls, and values derived from histograms."""

from __future__ import annotations

import pytest

from shalekv_client import CallStatus
from shalekv_client.status import percentile


@pytest.mark.parametrize(
    ("histogram", "part", "least", "most"),
    [
        ([], 0.5, None, None),
        ([0, 0], 0.5, None, None),
        ([4], 0.5, 0, 2),
        ([0, 0, 0, 1], 0.5, 8, 16),
        ([99, 0, 0, 0, 1], 0.5, 0, 2),
        ([99, 0, 0, 0, 1], 0.99, 0, 2),
        ([98, 0, 0, 0, 2], 0.99, 16, 32),
        ([1, 1], 1.0, 4, 4),
    ],
)
def test_percentiles_lie_in_the_bucket_that_holds_them(
    histogram: list[int], part: float, least: float | None, most: float | None
) -> None:
    """A percentile is between the ends of its bucket; an empty histogram has none."""
    found = percentile(histogram, part)
    if least is None or most is None:
        assert found is None
    else:
        assert found is not None
        assert least <= found <= most


def test_calls_since_an_earlier_status() -> None:
    """The calls since an earlier status are the differences, or all calls if the counter
    went back.
    """
    before = CallStatus("KV.Get", 2, 1, 10, (0, 2))
    after = CallStatus("KV.Get", 5, 1, 40, (1, 3, 1))
    assert after.since(before) == CallStatus("KV.Get", 3, 0, 30, (1, 1, 1))
    assert after.since(None) == after
    assert before.since(after) == before
