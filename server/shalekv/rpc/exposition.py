"""Metrics as text: OpenMetrics, or the older format of Prometheus, as the scraper prefers.

Histograms have fixed bounds, so that series do not depend on data. They count values up to powers
of two: a bound of a duration is such a power of microseconds, a bound of whole numbers is the
greatest number below one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import groupby

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as PLAIN
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from shalekv.telemetry.histogram import Histogram
from shalekv.telemetry.metrics import FAMILIES, PREFIX, Family, Kind, Labels, Metrics, Sample

UNITS = ("seconds", "bytes", "dollars")  # an ending of a name that is its unit
DURATION_POWERS = range(6, 27)  # 64 us to 67 s
BYTES_POWERS = range(8, 29, 2)  # 256 bytes to 256 MiB
COUNT_POWERS = range(1, 14)  # to 8,192
A_TURN = 300  # lines of text between two chances for other tasks; each takes 5 us

_END = b"# EOF\n"


async def expose(metrics: Metrics, accept: str) -> tuple[bytes, str]:
    """Return the text of all samples in a format that the header `Accept` allows, and its type."""
    _, content_type = choose_encoder(accept)
    is_open = content_type.startswith("application/openmetrics-text")
    if is_open:
        content_type = openmetrics.CONTENT_TYPE_LATEST
        # Our names need no escaping, and looking at each letter of each line would take longest.
        encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
    else:
        content_type = PLAIN
        encode = partial(generate_latest, escaping=openmetrics.ALLOWUTF8)
    pieces, lines = [], 0
    for metric in families_of(metrics):
        pieces.append(encode(_One(metric)).removesuffix(_END))
        lines += len(metric.samples)
        if lines >= A_TURN:
            lines = 0
            await asyncio.sleep(0)
    return b"".join(pieces) + (_END if is_open else b""), content_type


def families_of(metrics: Metrics) -> Iterator[Metric]:
    """Yield the families that have samples, in the order of `FAMILIES`."""
    for name, samples in groupby(metrics, key=lambda each: each[0].name):
        family = FAMILIES[name]
        metric = Metric(PREFIX + name, family.help, family.kind.value, unit_of(family))
        for _, labels, sample in samples:
            _add(metric, family, labels, sample)
        yield metric


def sample_name(family: Family) -> str:
    """Return the name of its samples; of a histogram, the one that the endings are added to."""
    ending = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(family.kind, "")
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


def _add(metric: Metric, family: Family, values: Labels, sample: Sample) -> None:
    labels = dict(zip(family.labels, values, strict=True))
    name = metric.name
    if isinstance(sample, Histogram):
        for buckets, bound in bounds_of(family):
            below = sum(sample.buckets[:buckets])
            metric.add_sample(f"{name}_bucket", {**labels, "le": repr(bound)}, below)
        count = sample.count
        metric.add_sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
        metric.add_sample(f"{name}_sum", labels, sample.total * family.unit_of_value)
        metric.add_sample(f"{name}_count", labels, count)
        return
    metric.add_sample(sample_name(family), labels, sample)


class _One:
    """A collection of one family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric
