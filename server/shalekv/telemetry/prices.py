"""Prices of requests to object stores, in US dollars, as integers: sums of costs are exact.

The lists are published list prices. They differ by region and change, so they are for an estimate,
and can be overridden. Sources: the price pages of Amazon S3, Amazon DynamoDB, Google Cloud Storage,
Azure Blob Storage and Cloudflare R2. Storage, traffic, discounts and free monthly quotas are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

AS_OF = "2026"
MINUTES_PER_MONTH = 30 * 24 * 60
# The kinds of requests that each service charges for: `store.api.RequestKind`.
OBJECT_KINDS = ("write", "list", "read", "delete")
RECORD_KINDS = ("record_write", "record_read")
KINDS = (*OBJECT_KINDS, *RECORD_KINDS)
PICO_DOLLARS = 10**12  # of a dollar
_PICO_DOLLARS_EACH = PICO_DOLLARS // 1_000  # of a request, if 1,000 cost a dollar


def dollars_of(pico_dollars: int | Fraction) -> float:
    """Convert a sum to dollars: the nearest number that there is."""
    return float(Fraction(pico_dollars) / PICO_DOLLARS)


@dataclass(frozen=True, slots=True)
class PriceList:
    """The prices of one service, or of several together, for requests."""

    title: str
    pico_dollars: Mapping[str, int]  # of one request, by kind; that of a missing kind is unknown

    @classmethod
    def of(cls, title: str, usd_per_1000: Mapping[str, Decimal]) -> PriceList:
        """Return a list; prices are rounded to a billionth of a dollar for 1,000 requests."""
        return cls(title, MappingProxyType(_rounded(usd_per_1000)))

    @property
    def usd_per_1000(self) -> Mapping[str, float]:
        """The prices of 1,000 requests in dollars."""
        return {kind: dollars_of(1_000 * price) for kind, price in self.pico_dollars.items()}

    def cost(self, sent: Mapping[str, int]) -> int | None:
        """Return the cost of requests, given by kind, in pico-dollars; None: one is unknown."""
        prices, sum_pico = self.pico_dollars, 0
        for kind, count in sent.items():
            if count:
                price = prices.get(kind)
                if price is None:
                    return None
                sum_pico += count * price
        return sum_pico

    def dollars(self, sent: Mapping[str, int]) -> float | None:
        """Return the cost of requests in dollars; None: it is not known."""
        cost = self.cost(sent)
        return None if cost is None else dollars_of(cost)

    def usd_per_month(self, kind: str, per_minute: float) -> float | None:
        """Return the cost of a month of 30 days at this rate; None if the price is unknown."""
        price = self.pico_dollars.get(kind)
        return None if price is None else per_minute * MINUTES_PER_MONTH * dollars_of(price)

    def with_prices(self, usd_per_1000: Mapping[str, Decimal]) -> PriceList:
        """Return a copy with other prices for some kinds."""
        if not usd_per_1000:
            return self
        both = {**self.pico_dollars, **_rounded(usd_per_1000)}
        return PriceList(f"{self.title}, except for given prices", MappingProxyType(both))

    def beside(self, other: PriceList) -> PriceList:
        """Combine the prices of two services that are used together."""
        both = {**self.pico_dollars, **other.pico_dollars}
        return PriceList(f"{self.title}; {other.title}", MappingProxyType(both))


def _rounded(usd_per_1000: Mapping[str, Decimal]) -> dict[str, int]:
    return {kind: round(price * _PICO_DOLLARS_EACH) for kind, price in usd_per_1000.items()}


def _objects(title: str, *, write: str, read: str) -> PriceList:
    # All providers charge a list like a write, and nothing for a delete.
    prices = {"write": write, "list": write, "read": read, "delete": "0"}
    return PriceList.of(title, {kind: Decimal(price) for kind, price in prices.items()})


OBJECTS: Mapping[str, PriceList] = MappingProxyType(
    {
        "s3": _objects(f"Amazon S3 Standard, us-east-1, {AS_OF}", write="0.005", read="0.0004"),
        "gcs": _objects(
            f"Google Cloud Storage Standard, one region, {AS_OF}", write="0.005", read="0.0004"
        ),
        "azure": _objects(f"Azure Blob Storage hot, LRS, {AS_OF}", write="0.0055", read="0.00044"),
        "r2": _objects(f"Cloudflare R2 Standard, {AS_OF}", write="0.0045", read="0.00036"),
        "free": _objects("free requests", write="0", read="0"),
    }
)
UNKNOWN_OBJECTS = PriceList("a store whose prices are not known", MappingProxyType({}))

# One unit for each request: items of up to 1 KB written, and up to 4 KB read consistently.
DYNAMODB = PriceList.of(
    f"DynamoDB on demand, us-east-1, {AS_OF}",
    {"record_write": Decimal("0.000625"), "record_read": Decimal("0.000125")},
)
OWN_RECORDS = PriceList.of(
    "records in a database of your own", dict.fromkeys(RECORD_KINDS, Decimal(0))
)

_BY_SCHEME = {"s3": "s3", "gs": "gcs", "az": "azure"}
_WITHOUT_COST = {"file": "local folder", "memory": "memory"}
_BY_END_OF_HOST = {
    ".amazonaws.com": "s3",
    ".r2.cloudflarestorage.com": "r2",
    "storage.googleapis.com": "gcs",
    ".blob.core.windows.net": "azure",
}


def price_list(url: str, endpoint: str, records: str, *, chosen: str | None = None) -> PriceList:
    """Return the prices of the store of a database.

    `endpoint` is the HOST:PORT of the store, empty for that of the provider; `records` the kind of
    the transactional store, empty for none; `chosen` a key of `OBJECTS` that overrides the rest.
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
    scheme = url.partition("://")[0]
    if scheme in _WITHOUT_COST:
        return _objects(_WITHOUT_COST[scheme], write="0", read="0")
    name = _BY_SCHEME.get(scheme)
    if endpoint:
        host = endpoint.rpartition(":")[0] or endpoint
        name = next((n for end, n in _BY_END_OF_HOST.items() if host.endswith(end)), None)
    return UNKNOWN_OBJECTS if name is None else OBJECTS[name]
