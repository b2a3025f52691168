"""Metrics: the families, which are an interface, and the samples of one moment.

`server/docs/metrics.md` is generated from `FAMILIES`, and a test pins them. A process collects its
samples when it is asked; it adds those that its child processes have reported.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from shalekv.telemetry.histogram import Histogram

PREFIX = "shalekv_"
Labels: TypeAlias = tuple[str, ...]
Sample: TypeAlias = float | Histogram


class MetricType(enum.StrEnum):
    """The types of OpenMetrics that are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class MergeRule(enum.StrEnum):
    """Rule by which samples with the same labels from several processes become one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name, meaning, and labels.

    A counter is named without its ending ``_total``. `unit_of_value` is the size of what its
    histogram counts, in the unit of the name: 1e-6 for microseconds in ``_seconds``.
    """

    name: str
    kind: MetricType
    help: str
    labels: Labels = ()
    merge: MergeRule = MergeRule.SUM
    unit_of_value: float = 1.0

    @property
    def is_cumulative(self) -> bool:
        """Return whether its samples only grow while a process runs."""
        return self.kind in {MetricType.COUNTER, MetricType.HISTOGRAM}


_US = 1e-6
_ALL = (
    # calls
    Family("calls", MetricType.COUNTER, "Calls that were answered.", ("method", "code")),
    Family(
        "call_duration_seconds",
        MetricType.HISTOGRAM,
        "Time from the arrival of a request to its reply; of a stream, its whole life.",
        ("method",),
        unit_of_value=_US,
    ),
    Family("calls_in_progress", MetricType.GAUGE, "Calls that have not been answered yet."),
    Family("connections", MetricType.GAUGE, "Connections of clients that are open."),
    Family(
        "refusals",
        MetricType.COUNTER,
        "Calls, operations, and requests to the port of metrics that were refused, by the reason "
        "in their error.",
        ("reason",),
    ),
    Family("slow_calls", MetricType.COUNTER, "Calls that took longer than --slow-ms.", ("method",)),
    Family(
        "ready", MetricType.GAUGE, "1 while these calls succeed, else 0.", ("calls",), MergeRule.MIN
    ),
    # commits
    Family("commits", MetricType.COUNTER, "Commits that were acknowledged as durable."),
    Family(
        "commit_bytes", MetricType.COUNTER, "Bytes of commits, as they are accounted in the queue."
    ),
    Family(
        "commit_stage_duration_seconds",
        MetricType.HISTOGRAM,
        "Time of a group of commits in a stage: queued, encoded, stored, visible.",
        ("stage",),
        unit_of_value=_US,
    ),
    Family("commit_group_commits", MetricType.HISTOGRAM, "Commits of a group."),
    Family("commit_group_bytes", MetricType.HISTOGRAM, "Bytes of a group."),
    Family("wal_objects", MetricType.COUNTER, "WAL objects that were written."),
    Family("wal_objects_in_flight", MetricType.GAUGE, "WAL objects that are being written."),
    Family(
        "sequence_number", MetricType.GAUGE, "The newest commit that reads show.", (), MergeRule.MIN
    ),
    # store
    Family(
        "store_requests",
        MetricType.COUNTER,
        "Attempts of requests to the object store that have ended: ok, failed (no answer), refused "
        "(by the store), given_up (by this process).",
        ("process", "operation", "folder", "outcome"),
    ),
    Family(
        "store_request_duration_seconds",
        MetricType.HISTOGRAM,
        "Time of an attempt of a request to the object store.",
        ("process", "operation", "folder"),
        unit_of_value=_US,
    ),
    Family(
        "store_bytes",
        MetricType.COUNTER,
        "Contents that were sent to, or received from, the object store.",
        ("process", "operation", "folder"),
    ),
    Family(
        "store_billed_requests",
        MetricType.COUNTER,
        "Requests over the wire, by the kind that they are charged as.",
        ("process", "kind"),
    ),
    Family(
        "store_price_dollars",
        MetricType.GAUGE,
        "The price of one request of this kind; missing where it is not known.",
        ("kind",),
        MergeRule.MAX,
    ),
    Family(
        "cost_dollars",
        MetricType.COUNTER,
        "Billed requests times their prices; missing where these are not known.",
        ("process", "kind"),
    ),
    Family(
        "slowest_store_request_seconds",
        MetricType.GAUGE,
        "The slowest attempt of a request of the last minute, if it was slower than --slow-ms.",
        ("process", "operation", "folder", "object"),
        MergeRule.MAX,
    ),
    Family(
        "slowest_store_request_waiting_calls",
        MetricType.GAUGE,
        "Calls that have waited for that request.",
        ("process", "operation", "folder", "object"),
        MergeRule.MAX,
    ),
    # cost by origin
    Family(
        "method_cost_dollars",
        MetricType.COUNTER,
        "The part of the cost that calls of a method have caused; background: no call.",
        ("method",),
    ),
    Family(
        "principal_cost_dollars",
        MetricType.COUNTER,
        "The part of the cost that a principal has caused; other: those with little of it.",
        ("principal",),
    ),
    Family("principal_calls", MetricType.COUNTER, "Calls of a principal.", ("principal",)),
    Family(
        "prefix_cost_dollars",
        MetricType.COUNTER,
        "The part of the cost that keys with this prefix have caused; other: the rest.",
        ("prefix",),
    ),
    Family(
        "prefix_calls",
        MetricType.COUNTER,
        "Calls that were charged to a prefix; of a group of commits, an estimate.",
        ("prefix",),
    ),
    # state of the database
    Family(
        "staleness_seconds",
        MetricType.GAUGE,
        "Greatest age of what reads show: 0 at the writer.",
        (),
        MergeRule.MAX,
    ),
    Family(
        "uncompacted_bytes",
        MetricType.GAUGE,
        "Memory of data that is not in the levels yet.",
        (),
        MergeRule.MAX,
    ),
    Family(
        "uncompacted_wal_objects",
        MetricType.GAUGE,
        "WAL objects whose data is not in the levels yet.",
        (),
        MergeRule.MAX,
    ),
    Family(
        "compaction_debt_bytes",
        MetricType.GAUGE,
        "Bytes that compactions have to read until each level has its size.",
        (),
        MergeRule.MAX,
    ),
    Family("level_ssts", MetricType.GAUGE, "SSTs of a level.", ("level",), MergeRule.MAX),
    Family("level_bytes", MetricType.GAUGE, "Bytes of a level.", ("level",), MergeRule.MAX),
    Family(
        "read_amplification",
        MetricType.GAUGE,
        "Sorted runs that a read may have to search: SSTs of L0, and levels.",
        (),
        MergeRule.MAX,
    ),
    Family(
        "space_amplification",
        MetricType.GAUGE,
        "Bytes of all levels for one byte of the last level.",
        (),
        MergeRule.MAX,
    ),
    Family("snapshots", MetricType.GAUGE, "Snapshots that have not expired.", (), MergeRule.MAX),
    Family(
        "pinned_bytes",
        MetricType.GAUGE,
        "Bytes that one snapshot keeps and nothing else does, of all snapshots; missing until a "
        "status has read what they keep.",
        (),
        MergeRule.MAX,
    ),
    Family(
        "oldest_pin_age_seconds", MetricType.GAUGE, "Age of the oldest snapshot.", (), MergeRule.MAX
    ),
    Family(
        "database_epoch",
        MetricType.GAUGE,
        "The epoch of the newest writer that is known; it grows when a writer opens.",
        (),
        MergeRule.MAX,
    ),
    # reads, caches and memory
    Family(
        "cache_lookups", MetricType.COUNTER, "Lookups in a cache: hit or miss.", ("cache", "result")
    ),
    Family("cache_bytes", MetricType.GAUGE, "Bytes that a cache holds.", ("cache",)),
    Family("cache_max_bytes", MetricType.GAUGE, "Bytes that a cache may hold.", ("cache",)),
    Family(
        "filter_lookups",
        MetricType.COUNTER,
        "Lookups that a filter answered (negative), or let through in vain (false_positive).",
        ("result",),
    ),
    Family("memory_bytes", MetricType.GAUGE, "Memory that a component uses.", ("component",)),
    Family(
        "memory_max_bytes", MetricType.GAUGE, "Memory that a component may use.", ("component",)
    ),
    # readers and watches
    Family(
        "reader_gaps", MetricType.COUNTER, "Waits for a WAL object although later ones were there."
    ),
    Family("reader_gap_seconds", MetricType.COUNTER, "Total time of these waits."),
    Family("watches", MetricType.GAUGE, "Watches that are open."),
    Family(
        "watch_buffered_bytes",
        MetricType.GAUGE,
        "Bytes of changes that clients of watches have not taken yet.",
    ),
    Family(
        "watches_cut", MetricType.COUNTER, "Watches that were closed because they were too slow."
    ),
    # processes
    Family(
        "build",
        MetricType.INFO,
        "The version of the server, and its role.",
        ("version", "role"),
        MergeRule.MAX,
    ),
    Family("process_cpu_seconds", MetricType.COUNTER, "CPU time of a process.", ("process",)),
    Family(
        "process_resident_bytes", MetricType.GAUGE, "Resident memory of a process.", ("process",)
    ),
    Family(
        "event_loop_lag_seconds",
        MetricType.GAUGE,
        "The longest delay of the event loop in the last 15 seconds.",
        (),
        MergeRule.MAX,
    ),
    Family("child_running", MetricType.GAUGE, "1 while a child process runs, else 0.", ("child",)),
    Family("child_starts", MetricType.COUNTER, "Starts of a child process.", ("child",)),
    Family("child_crashes", MetricType.COUNTER, "Ends of a child process by an error.", ("child",)),
    # compactor and collector
    Family(
        "compactions",
        MetricType.COUNTER,
        "Compactions that were published: of the wal, of levels, or a move of SSTs as they are.",
        ("kind",),
    ),
    Family(
        "compaction_bytes",
        MetricType.COUNTER,
        "Bytes that merges have read and written.",
        ("kind", "direction"),
    ),
    Family("compaction_failures", MetricType.COUNTER, "Merges that have failed."),
    Family("collected_objects", MetricType.COUNTER, "Objects that the collector has deleted."),
    Family(
        "collections",
        MetricType.COUNTER,
        "Runs of the collector over a database: ok or failed.",
        ("outcome",),
    ),
    # elections and fencing
    Family(
        "elections",
        MetricType.COUNTER,
        "Terms of this process: started, and those that others than a stop have ended: lost (the "
        "lease), fenced (by another writer), failed.",
        ("event",),
    ),
    Family(
        "serving",
        MetricType.GAUGE,
        "1 while this process serves, 0 while it stands by.",
        (),
        MergeRule.MIN,
    ),
    Family(
        "fenced",
        MetricType.COUNTER,
        "Times that another process has taken the database over from this one.",
    ),
    # safekeepers
    Family(
        "safekeeper_connected",
        MetricType.GAUGE,
        "1 while a safekeeper follows the writer.",
        ("member",),
        MergeRule.MAX,
    ),
    Family(
        "safekeeper_lag_records",
        MetricType.GAUGE,
        "Records of the log that a safekeeper has not on disk, as the writer knows.",
        ("member",),
        MergeRule.MAX,
    ),
    Family(
        "quorum_unarchived_bytes",
        MetricType.GAUGE,
        "Bytes of records on safekeepers that are not in the store yet.",
        (),
        MergeRule.MAX,
    ),
    Family(
        "safekeeper_log_bytes",
        MetricType.GAUGE,
        "Bytes of a log on this safekeeper.",
        ("database",),
    ),
    Family(
        "safekeeper_unarchived_objects",
        MetricType.GAUGE,
        "WAL objects of a log that are not in the store yet.",
        ("database",),
    ),
    Family(
        "safekeeper_disk_free_bytes",
        MetricType.GAUGE,
        "Free bytes of the disk with the logs.",
        (),
        MergeRule.MIN,
    ),
    # security, audit, traces
    Family(
        "certificate_expiry_timestamp_seconds",
        MetricType.GAUGE,
        "When the first certificate of a file expires, in seconds since 1970.",
        ("file",),
        MergeRule.MIN,
    ),
    Family("audit_lines_lost", MetricType.COUNTER, "Lines that the audit log could not write."),
    Family("spans_dropped", MetricType.COUNTER, "Spans that could not be exported."),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})


class Metrics:
    """Samples of one moment, by family and labels."""

    def __init__(self) -> None:
        """Begin without samples."""
        self._samples: dict[tuple[str, Labels], Sample] = {}

    def __iter__(self) -> Iterator[tuple[Family, Labels, Sample]]:
        """Yield the samples, family by family in the order of `FAMILIES`."""
        order = {name: number for number, name in enumerate(FAMILIES)}
        for name, labels in sorted(self._samples, key=lambda each: (order[each[0]], each[1])):
            yield FAMILIES[name], labels, self._samples[name, labels]

    def get(self, name: str, *labels: str) -> Sample | None:
        """Return a sample; None: there is none."""
        return self._samples.get((name, labels))

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a sample. One with the same labels is merged with it, as the family says.

        Raises KeyError when there is no such family, ValueError for another number of labels.
        """
        family = _checked(name, labels)
        known = self._samples.get((name, labels))
        if isinstance(known, (int, float)):
            if family.merge is MergeRule.SUM:
                value += known
            else:
                value = (max if family.merge is MergeRule.MAX else min)(value, known)
        self._samples[name, labels] = value

    def add_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """Add a histogram. Raises as `add`."""
        _checked(name, labels)
        known = self._samples.setdefault((name, labels), Histogram())
        assert isinstance(known, Histogram)
        known.merge(histogram.buckets, histogram.total)

    def leave_out(self, labels: Collection[str]) -> None:
        """Remove the families that have one of these labels."""
        hidden = {
            name for name, family in FAMILIES.items() if not {*family.labels}.isdisjoint(labels)
        }
        self._samples = {key: each for key, each in self._samples.items() if key[0] not in hidden}

    def merge(self, other: Metrics) -> None:
        """Add the samples of another process."""
        for (name, labels), sample in other._samples.items():
            if isinstance(sample, Histogram):
                self.add_histogram(name, sample, *labels)
            else:
                self.add(name, sample, *labels)

    def cumulative(self) -> Metrics:
        """Return the counters and the histograms: what remains true of a process that has ended."""
        left = Metrics()
        left._samples = {
            key: sample for key, sample in self._samples.items() if FAMILIES[key[0]].is_cumulative
        }
        return left

    def rows(self) -> list[Any]:
        """Convert to values of JSON, for another process of the same version."""
        return [
            [name, labels, sample.encoded() if isinstance(sample, Histogram) else sample]
            for (name, labels), sample in self._samples.items()
        ]

    def encode(self) -> bytes:
        """Encode as JSON, for another process of the same version."""
        return json.dumps(self.rows(), separators=(",", ":")).encode()


def decode_metrics(data: bytes) -> Metrics:
    """Decode what `encode` has made. Raises ValueError; unknown families are left out."""
    try:
        return metrics_of(json.loads(data))
    except RecursionError:
        raise ValueError("these are no metrics") from None


def metrics_of(rows: Iterable[Any]) -> Metrics:
    """Convert back what `Metrics.rows` has made. Raises as `decode_metrics`."""
    metrics = Metrics()
    try:
        for name, labels, sample in rows:
            if name in FAMILIES:
                _add_decoded(metrics, name, labels, sample)
    except (TypeError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"these are no metrics: {error}") from None
    return metrics


def _add_decoded(metrics: Metrics, name: str, labels: list[str], sample: Any) -> None:
    if isinstance(sample, list) is not (FAMILIES[name].kind is MetricType.HISTOGRAM):
        raise ValueError(f"these are no metrics: {name} is a {FAMILIES[name].kind}")
    if isinstance(sample, list):
        total, buckets = sample
        histogram = Histogram()
        histogram.merge(map(int, buckets), int(total))
        _check_finite(*histogram.buckets, histogram.total)
        metrics.add_histogram(name, histogram, *map(str, labels))
    else:
        _check_finite(sample)
        metrics.add(name, sample + 0, *map(str, labels))


def _check_finite(*numbers: Any) -> None:
    """Raise ValueError, OverflowError or TypeError for what cannot be written as a float."""
    if not all(map(math.isfinite, numbers)):
        raise ValueError("these are no metrics: a sample is not finite")


def _checked(name: str, labels: Labels) -> Family:
    family = FAMILIES[name]
    if len(labels) != len(family.labels):
        raise ValueError(f"{name} has the labels {family.labels}, and not {labels}")
    return family
