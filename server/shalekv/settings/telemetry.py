"""Settings of metrics, slow calls and traces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from shalekv.settings.model import Settings
from shalekv.settings.server import PORT_MAX

# What stores charge for, as `usd_per_1000` names it.
_PRICED = ("writes", "lists", "reads", "deletes", "record_writes", "record_reads")
_USD_MAX = 1_000


class PriceChoice(StrEnum):
    """A provider whose list prices are known."""

    S3 = "s3"
    GCS = "gcs"
    AZURE = "azure"
    R2 = "r2"
    FREE = "free"


class JobTelemetrySettings(Settings):
    """Metrics, costs and traces of a process without calls; it records all of its jobs."""

    metrics: str = Field(
        default="",
        description="HOST:PORT at which this process serves /metrics (OpenMetrics), /livez and "
        "/readyz over HTTP; port 0 picks a free one. It has TLS and asks for tokens as the port of "
        "gRPC does; an address other than loopback needs --tls-cert, or --insecure. Not set: none.",
        json_schema_extra={"user": "operator: Prometheus, and probes of Kubernetes"},
    )
    slow_ms: int = Field(
        default=1_000,
        ge=0,
        le=3_600_000,
        description="Calls that take longer are logged, with what they waited for, and are kept "
        "for `shalekv admin slow`; also requests to the object store, milliseconds. 0: none.",
        json_schema_extra={"user": "operator: what is slow depends on the store"},
    )
    otlp_endpoint: str = Field(
        default="",
        description="URL of a collector of OpenTelemetry, such as http://127.0.0.1:4318, to which "
        "spans are sent (OTLP over HTTP). Needs the extra otel. Not set: no traces.",
        json_schema_extra={"user": "operator who has a store of traces"},
    )
    prices: PriceChoice | None = Field(
        default=None,
        description="The provider whose list prices the cost in metrics and replies is computed "
        "with. Not set: by the URL and the endpoint of the database; a store of your own has no "
        "known prices, and then no cost is told.",
        json_schema_extra={"user": "operator: what requests cost depends on who stores"},
    )
    usd_per_1000: str = Field(
        default="",
        description="Prices of your own in US dollars for 1,000 requests, such as "
        "writes=0.0054,lists=0.0054,reads=0.00043,deletes=0; also record_writes and record_reads. "
        "They replace those of `prices`.",
        json_schema_extra={"user": "operator: regions and contracts have other prices"},
    )

    @property
    def own_prices(self) -> Mapping[str, Decimal]:
        """The prices of `usd_per_1000`, by kind of request, such as ``write``."""
        return dict(map(_price, filter(None, map(str.strip, self.usd_per_1000.split(",")))))

    @model_validator(mode="after")
    def _prices_are_numbers(self) -> Self:
        _ = self.own_prices
        return self

    @model_validator(mode="after")
    def _metrics_have_a_port(self) -> Self:
        host, _, port = self.metrics.rpartition(":")
        if self.metrics and (not host or not port.isdigit() or int(port) > PORT_MAX):
            message = f"metrics must be HOST:PORT with a port of 0 to 65535, not {self.metrics!r}"
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _endpoint_is_a_url(self) -> Self:
        url = urlsplit(self.otlp_endpoint)
        if self.otlp_endpoint and (url.scheme not in {"http", "https"} or not url.hostname):
            message = f"otlp_endpoint must be http://HOST:PORT or https://..., not {url.geturl()!r}"
            raise ValueError(message)
        if "@" in url.netloc:
            raise ValueError(
                "otlp_endpoint: credentials do not belong in a URL, which appears in logs; "
                "OTEL_EXPORTER_OTLP_HEADERS in the environment can have them"
            )
        return self


class TelemetrySettings(JobTelemetrySettings):
    """Metrics, costs, traces and slow calls of a process that answers calls."""

    trace_ratio: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Part of the calls that are traced, of those whose caller does not decide it "
        "by the metadata `traceparent`.",
        json_schema_extra={"user": "operator: cost of traces against what they show"},
    )


def _price(text: str) -> tuple[str, Decimal]:
    name, _, number = text.partition("=")
    with suppress(InvalidOperation):  # no number, or none that can be compared
        price = Decimal(number)
        if name in _PRICED and 0 <= price <= _USD_MAX:
            return name.removesuffix("s"), price
    raise ValueError(
        f"usd_per_1000 must be KIND=DOLLARS,... with the kinds {', '.join(_PRICED)} and prices of "
        f"0 to {_USD_MAX}, not {text!r}"
    )
