"""Metrics as text: OpenMetrics, or the older format of Prometheus, as the scraper prefers.

Histograms have fixed bounds, so that series do not depend on data. They count values up to powers
of two: a bound of a duration is such a power of microseconds, a bound of whole numbers is the
greatest number below one.

`prometheus_client` takes 14 us for a line, and a scrape has thousands. All of a line but its value
is the same at each scrape, and in both formats, so it is kept from one scrape to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, groupby

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as PLAIN
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from shalekv.telemetry.histogram import Histogram
from shalekv.telemetry.metrics import FAMILIES, PREFIX, Family, Labels, Metrics, MetricType, Sample

UNITS = ("seconds", "bytes", "dollars")  # an ending of a name that is its unit
DURATION_POWERS = range(6, 27)  # 64 us to 67 s
BYTES_POWERS = range(8, 29, 2)  # 256 bytes to 256 MiB
COUNT_POWERS = range(1, 14)  # to 8,192
LINE_US, NEW_LINE_US = 1, 15  # about what a line takes
TURN_US = 1_000  # between two chances for other tasks

_END = "# EOF\n"
_ZERO = "0.0"


class Exposition:
    """Makes texts of the metrics of one process, again and again."""

    def __init__(self) -> None:
        """Begin with nothing kept."""
        # By family and labels, of what the last text had.
        self._lines: Mapping[tuple[str, Labels], Sequence[str]] = {}

    async def text(self, metrics: Metrics, accept: str) -> tuple[bytes, str]:
        """Return all samples in a format that the header `Accept` allows, and its media type."""
        is_open = _prefers_open(accept)
        pieces: list[str] = []
        known, used = self._lines, dict[tuple[str, Labels], Sequence[str]]()
        turn_us = 0
        for name, samples in groupby(metrics, key=lambda each: each[0].name):
            pieces.append(_head(name, is_open=is_open))
            for family, labels, sample in samples:
                lines = known.get((name, labels))
                turn_us += LINE_US * len(lines or ())
                if lines is None:
                    lines = _lines_of(family, labels)
                    turn_us += NEW_LINE_US * len(lines)
                used[name, labels] = lines
                for line, value in zip(lines, _values_of(family, sample), strict=True):
                    pieces.append(f"{line}{value}\n")
                if turn_us >= TURN_US:
                    turn_us = 0
                    await asyncio.sleep(0)
        self._lines = used
        pieces.append(_END if is_open else "")
        return "".join(pieces).encode(), openmetrics.CONTENT_TYPE_LATEST if is_open else PLAIN


def _prefers_open(accept: str) -> bool:
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        return False
    return content_type.startswith("application/openmetrics-text")


def sample_name(family: Family) -> str:
    """Return the name of its samples; of a histogram, the one that the endings are added to."""
    ending = {MetricType.COUNTER: "_total", MetricType.INFO: "_info"}.get(family.kind, "")
    return PREFIX + family.name + ending


def unit_of(family: Family) -> str:
    """Return the unit, which ends the name; empty: it counts things, or is a ratio."""
    ending = family.name.rpartition("_")[2]
    return ending if ending in UNITS else ""


def bounds_of(family: Family) -> Iterator[tuple[int, float]]:
    """Yield the bounds of a histogram: the number of buckets below each, and its value."""
    if family.unit_of_value != 1:
        for power in DURATION_POWERS:
            yield power, 2**power * family.unit_of_value
        return
    for power in BYTES_POWERS if unit_of(family) == "bytes" else COUNT_POWERS:
        yield power, float(2**power - 1)


@cache
def _buckets_of(name: str) -> Sequence[int]:
    return [buckets for buckets, _ in bounds_of(FAMILIES[name])]


@cache
def _head(name: str, *, is_open: bool) -> str:
    """Return the lines before the samples of a family."""
    encode = openmetrics.generate_latest if is_open else generate_latest
    return encode(_One(_metric(FAMILIES[name]))).decode().removesuffix(_END)


def _lines_of(family: Family, values: Labels) -> Sequence[str]:
    """Return the lines of a sample without its values."""
    # Paths of files, and names that others give, may have what is no Unicode.
    clean = (value.encode(errors="backslashreplace").decode() for value in values)
    metric, labels = _metric(family), dict(zip(family.labels, clean, strict=True))
    if family.kind is MetricType.HISTOGRAM:
        for bound in (*(repr(bound) for _, bound in bounds_of(family)), "+Inf"):
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, 0)
        metric.add_sample(f"{metric.name}_count", labels, 0)
        metric.add_sample(f"{metric.name}_sum", labels, 0)
    else:
        metric.add_sample(sample_name(family), labels, 0)
    lines = generate_latest(_One(metric)).decode().split("\n")
    return [line.removesuffix(_ZERO) for line in lines if line and not line.startswith("#")]


def _values_of(family: Family, sample: Sample) -> Iterator[str]:
    """Yield the values of the lines of `_lines_of`."""
    if not isinstance(sample, Histogram):
        yield _number(sample)
        return
    below = [0, *accumulate(sample.buckets)]
    for buckets in _buckets_of(family.name):
        yield str(below[buckets])
    yield str(below[-1])
    yield str(below[-1])
    yield _number(sample.total * family.unit_of_value)


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _metric(family: Family) -> Metric:
    return Metric(PREFIX + family.name, family.help, family.kind.value, unit_of(family))


class _One:
    """A collection of one family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric
