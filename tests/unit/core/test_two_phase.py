"""What a record says to the owner of a source."""

from __future__ import annotations

import pytest

from shalekv.core.two_phase import Destination, Record, Standing, standing

HERE = Destination("s3://bucket/here", "wal/1")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, Standing.FREE),
        (Record(HERE, "ours"), Standing.OURS),
        (Record(HERE, "ours", is_committed=True), Standing.OURS_DONE),
        (Record(HERE, "theirs"), Standing.THEIRS),
        (Record(HERE, "theirs", is_committed=True), Standing.THEIRS_DONE),
    ],
)
def test_standings(record: Record | None, expected: Standing) -> None:
    """A source is in the record or is not, and the record is open or done."""
    assert standing(record, "ours") is expected
