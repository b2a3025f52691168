"""Prices of requests: which list a store has, and exact sums."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.settings import PriceChoice, TelemetrySettings
from shalekv.telemetry.prices import (
    DYNAMODB,
    KINDS,
    OBJECTS,
    RECORD_KINDS,
    UNKNOWN_OBJECTS,
    PriceList,
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
    """The provider is that of the URL, unless the endpoint belongs to another one."""
    found = price_list(url, endpoint, "")
    assert found.usd_per_1000 == OBJECTS[expected].usd_per_1000


@pytest.mark.parametrize("endpoint", ["localhost:9000", "[::1]:9000", "notamazonaws.com"])
def test_a_store_without_a_provider_has_no_prices(endpoint: str) -> None:
    """A store without a provider has no prices unless some are chosen."""
    found = price_list("s3://bucket", endpoint, "")
    assert found == UNKNOWN_OBJECTS
    assert found.usd_per_month("write", 1.0) is None
    assert price_list("s3://bucket", endpoint, "", chosen="r2") == OBJECTS["r2"]


def test_records_are_priced_beside_the_objects() -> None:
    """Records in DynamoDB have its prices; those in a database of one's own cost nothing."""
    found = price_list("s3://bucket", "", "dynamodb")
    assert found.usd_per_1000 == {**OBJECTS["s3"].usd_per_1000, **DYNAMODB.usd_per_1000}
    assert "DynamoDB" in found.title
    own = price_list("s3://bucket", "", "postgresql")
    assert [own.usd_per_month(kind, 1.0) for kind in RECORD_KINDS] == [0.0, 0.0]
    assert price_list("s3://bucket", "", "").usd_per_month("record_read", 1.0) is None


COUNTS = st.dictionaries(st.sampled_from(KINDS), st.integers(0, 10**9))
USD = st.decimals(0, 100, places=9)


@given(
    parts=st.lists(COUNTS),
    usd_per_1000=st.fixed_dictionaries(dict.fromkeys(KINDS, USD)),
)
def test_the_cost_of_a_sum_is_the_sum_of_costs(
    parts: list[dict[str, int]], usd_per_1000: dict[str, Decimal]
) -> None:
    """Costs of parts add up to the cost of the whole, and to what decimal arithmetic finds."""
    prices = PriceList.of("mine", usd_per_1000)
    whole = {kind: sum(part.get(kind, 0) for part in parts) for kind in KINDS}
    costs = [prices.cost(part) for part in parts]
    assert prices.cost(whole) == sum(cost for cost in costs if cost is not None)
    exact = sum(count * usd_per_1000[kind] / 1_000 for kind, count in whole.items())
    assert prices.dollars(whole) == float(exact)


def test_a_cost_with_an_unknown_price_is_unknown() -> None:
    """One request of a kind without a price makes a sum unknown; none of them do not."""
    prices = PriceList.of("mine", {"write": Decimal("0.005")})
    assert prices.cost({"write": 3, "read": 0}) == 15_000_000
    assert prices.cost({"write": 3, "read": 1}) is None
    assert prices.dollars({"read": 1}) is None
    both = prices.with_prices({"read": Decimal("0.0004")})
    assert both.dollars({"write": 3, "read": 1}) == 0.0000154


def test_settings_name_the_same_kinds_and_providers() -> None:
    """Settings have the kinds and the providers of the price lists."""
    assert [*PriceChoice] == [*OBJECTS]
    every = ", ".join(f"{kind}s=0.{number}" for number, kind in enumerate(KINDS, 1))
    settings = TelemetrySettings(usd_per_1000=every)
    assert [*settings.own_prices] == [*KINDS]
    assert settings.own_prices["record_read"] == Decimal("0.6")


@pytest.mark.parametrize("wrong", ["writes", "writes=", "write=1", "writes=-1", "reads=nan", "x=1"])
def test_a_price_that_is_none_is_refused(wrong: str) -> None:
    """What is no price of a kind is refused, and the error says what is possible."""
    with pytest.raises(ValueError, match=r"KIND=DOLLARS.* not '" + wrong):
        TelemetrySettings(usd_per_1000=f"lists=1,{wrong}")
