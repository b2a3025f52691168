"""What requests cost: which list applies, and the arithmetic."""

from __future__ import annotations

import pytest

from shalekv.core.prices import (
    DYNAMODB,
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
