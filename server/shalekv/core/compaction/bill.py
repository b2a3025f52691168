"""What a store charges: requests by kind, and bytes kept, times its prices."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shalekv.settings.model import GIB

_REQUESTS = 1_000  # prices are for so many
MONTH_S = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """US dollars. The defaults are what S3 Standard charges in us-east-1."""

    put_usd_per_1000: float = 0.005
    list_usd_per_1000: float = 0.005
    get_usd_per_1000: float = 0.0004
    delete_usd_per_1000: float = 0.0
    storage_usd_per_gib_month: float = 0.023


@dataclass(slots=True)
class Requests:
    """Requests to the store, by kind."""

    put: float = 0.0
    get: float = 0.0
    list: float = 0.0
    delete: float = 0.0

    def add(self, other: Requests, times: float = 1.0) -> None:
        """Count the other ones as well, so many times."""
        for kind in fields(self):
            total = getattr(self, kind.name) + times * getattr(other, kind.name)
            setattr(self, kind.name, total)


@dataclass(frozen=True, slots=True)
class Bill:
    """US dollars for a month of this."""

    requests_usd: float
    storage_usd: float


# An edit of the manifest creates the next one between two lists; rule F2 asks for the second.
EDIT = Requests(put=1, list=2)


def monthly_bill(
    requests: Requests, *, elapsed_s: float, stored_bytes: float, prices: Prices
) -> Bill:
    """The bill of a month that is like the `elapsed_s` in which `requests` were sent."""
    usd = (
        requests.put * prices.put_usd_per_1000
        + requests.list * prices.list_usd_per_1000
        + requests.get * prices.get_usd_per_1000
        + requests.delete * prices.delete_usd_per_1000
    ) / _REQUESTS
    return Bill(
        requests_usd=usd * MONTH_S / max(elapsed_s, 1e-9),
        storage_usd=stored_bytes / GIB * prices.storage_usd_per_gib_month,
    )
