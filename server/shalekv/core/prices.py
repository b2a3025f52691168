"""What stores charge for requests: published list prices, in US dollars.

Prices differ by region and change; these are for an estimate, and can be overridden. Sources: the
pages on prices of Amazon S3, Amazon DynamoDB, Google Cloud Storage, Azure Blob Storage and
Cloudflare R2. Storage, traffic, discounts and what is free each month are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

AS_OF = "2026"
MINUTES_PER_MONTH = 30 * 24 * 60

# The kinds of requests that each service charges for.
OBJECT_KINDS = ("write", "list", "read", "delete")
RECORD_KINDS = ("record_write", "record_read")


@dataclass(frozen=True, slots=True)
class PriceList:
    """What one service charges for requests."""

    title: str
    usd_per_1000: Mapping[str, float]  # by kind; that of one which is missing is not known

    def usd_per_month(self, kind: str, per_minute: float) -> float | None:
        """What a month of 30 days costs at this rate. None: nobody knows."""
        price = self.usd_per_1000.get(kind)
        return None if price is None else per_minute * MINUTES_PER_MONTH * price / 1_000

    def with_prices(self, usd_per_1000: Mapping[str, float]) -> PriceList:
        """The same, but for these kinds."""
        title = f"{self.title}, but for what was given" if usd_per_1000 else self.title
        return PriceList(title, MappingProxyType({**self.usd_per_1000, **usd_per_1000}))

    def beside(self, other: PriceList) -> PriceList:
        """The prices of two services that are used together."""
        both = {**self.usd_per_1000, **other.usd_per_1000}
        return PriceList(f"{self.title}; {other.title}", MappingProxyType(both))


def _objects(title: str, *, write: float, read: float) -> PriceList:
    # All of them charge a list as a write, and nothing for a delete.
    prices = {"write": write, "list": write, "read": read, "delete": 0.0}
    return PriceList(title, MappingProxyType(prices))


OBJECTS: Mapping[str, PriceList] = MappingProxyType(
    {
        "s3": _objects(f"Amazon S3 Standard, us-east-1, {AS_OF}", write=0.005, read=0.000_4),
        "gcs": _objects(
            f"Google Cloud Storage Standard, one region, {AS_OF}", write=0.005, read=0.000_4
        ),
        "azure": _objects(f"Azure Blob Storage hot, LRS, {AS_OF}", write=0.005_5, read=0.000_44),
        "r2": _objects(f"Cloudflare R2 Standard, {AS_OF}", write=0.004_5, read=0.000_36),
        "free": _objects("requests that are free", write=0.0, read=0.0),
    }
)
UNKNOWN_OBJECTS = PriceList("a store whose prices are not known", MappingProxyType({}))

# One unit for each request: items of up to 1 KB written, and up to 4 KB read consistently.
DYNAMODB = PriceList(
    f"DynamoDB on demand, us-east-1, {AS_OF}",
    MappingProxyType({"record_write": 0.000_625, "record_read": 0.000_125}),
)
OWN_RECORDS = PriceList(
    "records in a database of your own", MappingProxyType(dict.fromkeys(RECORD_KINDS, 0.0))
)

_BY_SCHEME = {"s3": "s3", "gs": "gcs", "az": "azure", "file": "free", "memory": "free"}
_BY_END_OF_HOST = {
    ".amazonaws.com": "s3",
    ".r2.cloudflarestorage.com": "r2",
    "storage.googleapis.com": "gcs",
    ".blob.core.windows.net": "azure",
}


def price_list(url: str, endpoint: str, records: str, *, chosen: str | None = None) -> PriceList:
    """The prices of the store of a database.

    `endpoint` is the HOST:PORT of the store, empty for that of the provider; `records` the kind of
    the transactional store, empty for none; `chosen` a key of `OBJECTS`, if somebody knows better.
    """
    objects = OBJECTS[chosen] if chosen is not None else _objects_of(url, endpoint)
    match records:
        case "":
            return objects
        case "dynamodb":
            return objects.beside(DYNAMODB)
        case _:
            return objects.beside(OWN_RECORDS)


def _objects_of(url: str, endpoint: str) -> PriceList:
    name = _BY_SCHEME.get(url.partition("://")[0])
    if endpoint and name != "free":
        host = endpoint.rpartition(":")[0] or endpoint
        name = next((n for end, n in _BY_END_OF_HOST.items() if host.endswith(end)), None)
    return UNKNOWN_OBJECTS if name is None else OBJECTS[name]
