"""What requests cost: which list applies, and the arithmetic."""

from __future__ import annotations

import pytest

from shalekv.core.prices import (
    DYNAMODB,
    OBJECT_KINDS,
    OBJECTS,
    RECORD_KINDS,
    UNKNOWN_OBJECTS,
    price_list,
)


@pytest.mark.parametrize(
    ("url", "endpoint", "expected"),
    [
        ("s3://bucket/folder", "", "s3"),
        ("s3://bucket", "s3.eu-west-1.amazonaws.com", "s3"),
        ("s3://bucket", "0123.r2.cloudflarestorage.com:443", "r2"),
        ("s3://bucket", "storage.googleapis.com", "gcs"),
        ("gs://bucket", "", "gcs"),
        ("az://container", "", "azure"),
        ("az://container", "me.blob.core.windows.net", "azure"),
        ("file:///var/lib/db", "", "free"),
        ("file:///var/lib/db", "left.over:9000", "free"),
        ("memory://trial", "", "free"),
    ],
)
def test_prices_are_found_by_url_and_endpoint(url: str, endpoint: str, expected: str) -> None:
    """The provider of the URL, unless the endpoint is another one's."""
    assert price_list(url, endpoint, "") == OBJECTS[expected]


@pytest.mark.parametrize("endpoint", ["localhost:9000", "[::1]:9000", "notamazonaws.com"])
def test_prices_of_a_store_of_ones_own_are_not_known(endpoint: str) -> None:
    """No figure is made up; it can be chosen whose prices to take."""
    found = price_list("s3://bucket", endpoint, "")
    assert found == UNKNOWN_OBJECTS
    assert found.usd_per_month("write", 1.0) is None
    assert price_list("s3://bucket", endpoint, "", chosen="r2") == OBJECTS["r2"]


def test_records_are_priced_beside_the_objects() -> None:
    """Those of DynamoDB by its list; a database of one's own charges nothing for a request."""
    found = price_list("s3://bucket", "", "dynamodb")
    assert found.usd_per_1000 == {**OBJECTS["s3"].usd_per_1000, **DYNAMODB.usd_per_1000}
    assert "DynamoDB" in found.title
    own = price_list("s3://bucket", "", "postgresql")
    assert [own.usd_per_month(kind, 1.0) for kind in RECORD_KINDS] == [0.0, 0.0]
    assert price_list("s3://bucket", "", "").usd_per_month("record_read", 1.0) is None


def test_every_list_is_complete() -> None:
    """A price for each kind; a list costs what a write does, a delete nothing."""
    for prices in OBJECTS.values():
        assert tuple(prices.usd_per_1000) == OBJECT_KINDS
        assert prices.usd_per_1000["list"] == prices.usd_per_1000["write"]
        assert prices.usd_per_1000["delete"] == 0


def test_a_month_has_thirty_days() -> None:
    """100 writes a minute are 4.32 million in a month, at 0.005 dollars for 1,000 of them."""
    assert OBJECTS["s3"].usd_per_month("write", 100.0) == pytest.approx(21.60)
    assert OBJECTS["s3"].usd_per_month("read", 100.0) == pytest.approx(1.728)


def test_prices_can_be_given() -> None:
    """They stand for those of the list, and it is said that they do."""
    given = OBJECTS["s3"].with_prices({"read": 1.0, "record_read": 2.0})
    assert given.usd_per_1000["read"] == 1.0
    assert given.usd_per_1000["record_read"] == 2.0
    assert given.usd_per_1000["write"] == OBJECTS["s3"].usd_per_1000["write"]
    assert "given" in given.title
    assert OBJECTS["s3"].with_prices({}) == OBJECTS["s3"]
