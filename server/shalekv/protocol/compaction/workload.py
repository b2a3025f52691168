"""Workloads for the simulator: the keys that are written, deleted and read, and the rates.

Keys are numbers of 64 bits, so that millions of them fit into arrays. In the size of an object each
counts with `key_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shalekv.settings.model import GIB

Numbers: TypeAlias = npt.NDArray[np.uint64]
Amounts: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_SCATTER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication by it is a bijection
_ZIPF_POWER = 0.99  # as in YCSB


class KeyOrder(Enum):
    """The order in which keys are written."""

    UNIFORM = "uniform"  # random; an overwrite or delete takes any key that was written
    ZIPF = "zipf"  # a few keys again and again
    SEQUENTIAL = "sequential"  # each above the one before; deletes take the lowest one left
    TIME_ORDERED = "time-ordered"  # sequential, but some keys arrive late


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The operations of clients. Shares are of all operations that write."""

    order: KeyOrder
    written_bytes: int  # total of keys and values
    value_bytes_min: int = 100  # lengths are uniform from here to `value_bytes_max`
    value_bytes_max: int = 10 * 1024
    key_bytes: int = 16
    key_count: int = 100_000  # number of keys of ZIPF
    overwrite_share: float = 0.0
    delete_share: float = 0.0
    write_bytes_per_s: float = 5_000_000.0
    gets_per_s: float = 100.0
    scans_per_s: float = 1.0
    scan_entries: int = 100
    cached_share: float = 0.9  # share of block reads that the cache serves
    seed: int = 1

    @property
    def operation_count(self) -> int:
        """The number of operations that write `written_bytes`."""
        value_bytes = (self.value_bytes_min + self.value_bytes_max) / 2 * (1 - self.delete_share)
        return max(int(self.written_bytes / (self.key_bytes + value_bytes)), 1)


# Values are large, so that a few 100,000 of them fill several levels. Amplification depends on the
# bytes, and hardly on the number of entries.
_LARGE_VALUE_BYTES = 120 * 1024
NAMED: Mapping[str, Workload] = {
    "uniform": Workload(
        order=KeyOrder.UNIFORM,
        written_bytes=24 * GIB,
        value_bytes_max=_LARGE_VALUE_BYTES,
        overwrite_share=0.2,
        delete_share=0.1,
    ),
    "overwrite": Workload(
        order=KeyOrder.ZIPF,
        written_bytes=16 * GIB,
        value_bytes_max=_LARGE_VALUE_BYTES,
        key_count=150_000,
        delete_share=0.05,
    ),
    "timeseries": Workload(
        order=KeyOrder.TIME_ORDERED,
        written_bytes=16 * GIB,
        value_bytes_max=_LARGE_VALUE_BYTES,
        delete_share=0.3,
        scans_per_s=10,
    ),
}


@dataclass(frozen=True, slots=True)
class Operations:
    """The write operations of a workload, each an array element."""

    keys: Numbers
    logical_bytes: Amounts  # size of key and value
    deletes: Flags
    live_bytes: Amounts  # size of all keys and values that exist after the operation

    def __len__(self) -> int:
        return len(self.keys)


def operations(workload: Workload) -> Operations:
    """Return the operations of a workload. They depend only on its fields, `seed` included."""
    random = np.random.default_rng(workload.seed)
    count = workload.operation_count
    drawn = random.random(count)
    deletes = drawn < workload.delete_share
    is_known = drawn < workload.delete_share + workload.overwrite_share
    keys = _keys(workload, random, deletes, is_known)
    lengths = random.integers(workload.value_bytes_min, workload.value_bytes_max + 1, count)
    logical = np.where(deletes, 0, lengths) + workload.key_bytes
    return Operations(keys, logical, deletes, _live_bytes(keys, logical, deletes))


def _keys(
    workload: Workload, random: np.random.Generator, deletes: Flags, is_known: Flags
) -> Numbers:
    count = len(deletes)
    if workload.order is KeyOrder.ZIPF:
        weights = np.cumsum(1.0 / np.arange(1, workload.key_count + 1) ** _ZIPF_POWER)
        ranks = np.searchsorted(weights, random.random(count) * weights[-1])
        scattered: Numbers = ranks.astype(np.uint64) * _SCATTER
        return scattered
    ordinals = np.cumsum(~is_known)  # number of new keys up to each operation
    known = (random.random(count) * ordinals).astype(np.int64)
    if workload.order is KeyOrder.UNIFORM:
        return np.where(is_known, known, ordinals).astype(np.uint64) * _SCATTER
    oldest = np.cumsum(deletes)
    late = np.zeros(count, dtype=np.int64)
    if workload.order is KeyOrder.TIME_ORDERED:
        late = (random.exponential(0.002, count) * ordinals).astype(np.int64)
    fresh = ordinals * 1024 - late * 1024 + random.integers(0, 1024, count)
    numbers = np.where(deletes, fresh[np.minimum(oldest, count - 1)], fresh)
    numbers = np.where(is_known & ~deletes, fresh[known], numbers)
    return (np.maximum(numbers, 0) << 16).astype(np.uint64)


def _live_bytes(keys: Numbers, logical: Amounts, deletes: Flags) -> Amounts:
    now = np.where(deletes, 0, logical)
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_now = keys[order], now[order]
    before = np.zeros_like(sorted_now)
    before[1:] = np.where(sorted_keys[1:] == sorted_keys[:-1], sorted_now[:-1], 0)
    change = np.empty_like(now)
    change[order] = sorted_now - before
    return np.cumsum(change)
