"""The options of a stream of changes, and its offsets."""

from __future__ import annotations

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

from shalekv.core.key_range import KeyRange
from shalekv.errors import InvalidRequest, InvalidSetting, InvalidUrl
from shalekv_spark.feed.offset import FeedOffset
from shalekv_spark.feed.options import NO_LIMIT
from tests.unit.spark_feed.feed_ground import feed_options


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"maxWalFiles": 1}, "unknown option maxwalfiles"),
        ({"startingOffset": "oldest"}, "startingOffset"),
        ({"startingOffset": -1}, "startingOffset"),
        ({"maxWalFilesPerTrigger": 0}, "maxWalFilesPerTrigger"),
        ({"maxBytesPerTrigger": "1g"}, "maxBytesPerTrigger"),
        ({"consumer": " x"}, "consumer"),
        ({"consumer": "x", "consumerTtl": 1}, "consumerTtl"),
        ({"consumer": "x", "consumerTtl": 1 << 40}, "consumerTtl"),
        ({"prefix": "a", "end": "b"}, "prefix"),
        ({"start": "b", "end": "a"}, "end"),
        ({"start": "zz", "keyEncoding": "hex"}, "start"),
        ({"keyEncoding": "latin-1"}, "keyEncoding"),
        ({"url": ""}, "url"),
        ({"url": "memory://"}, "memory"),
    ],
)
def test_bad_options_are_refused_by_name(given: dict[str, object], problem: str) -> None:
    """Before any store is asked."""
    with pytest.raises((InvalidSetting, InvalidUrl), match=problem):
        feed_options(**given)


def test_key_options_become_a_range() -> None:
    """In the encoding that is named."""
    assert feed_options(prefix="a").keys == KeyRange(b"a", b"b")
    assert feed_options(start="ff00", keyEncoding="HEX").keys == KeyRange(b"\xff\x00", b"")


def test_a_trigger_may_want_all_there_is() -> None:
    """Then the options do not limit it; else what Spark says does, and the rest of them."""
    options = feed_options(maxWalFilesPerTrigger=5, maxBytesPerTrigger=6)
    assert options.limits(ReadAllAvailable()) == (NO_LIMIT, NO_LIMIT)
    assert options.limits(ReadMaxFiles(4)) == (4, 6)
    assert options.limits(ReadMaxBytes(3)) == (5, 3)
    assert feed_options(maxWalFilesPerTrigger=1 << 70).files_max == NO_LIMIT  # what Spark can hold


@pytest.mark.parametrize(
    "offset",
    [FeedOffset(bytes(16), 0), FeedOffset(b"\x01" * 16, 9, 4, b"\x02" * 16)],
)
def test_offsets_come_back_as_they_were(offset: FeedOffset) -> None:
    """With all that they remember."""
    assert FeedOffset.of(offset.as_dict()) == offset


@pytest.mark.parametrize("value", [{}, {"walId": 1}, {"databaseId": "x", "walId": 1}])
def test_other_offsets_are_refused(value: dict[str, object]) -> None:
    """Such as those of another source."""
    with pytest.raises(InvalidRequest, match="offset"):
        FeedOffset.of(value)
