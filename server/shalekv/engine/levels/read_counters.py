"""What reading the levels came to: the figures of a status."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.store.disk_cache import DiskCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCounters:
    """What reading the levels came to so far. Hits and misses are those of the caches."""

    block_hits: int
    block_misses: int
    block_evictions: int
    block_held_bytes: int
    block_requests: int
    blocks_fetched: int
    block_fetched_bytes: int
    metadata_hits: int
    metadata_misses: int
    metadata_held_bytes: int
    metadata_requests: int
    metadata_fetched_bytes: int
    filter_negatives: int  # SSTs that were not looked into
    filter_positives: int
    filter_false_positives: int  # ... that held no version of the key
    in_flight_bytes: int
    in_flight_bytes_peak: int
    in_flight_waits: int  # requests that waited for the read budget
    disk: DiskCounters | None  # of the cache on disk, if there is one


@dataclass(slots=True)
class FilterCounts:
    """What filters said, counted by who asks them."""

    negatives: int = 0
    positives: int = 0
    false_positives: int = 0
