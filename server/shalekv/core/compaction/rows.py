"""Entries without their values, as arrays: what the simulator merges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shalekv.protocol.compaction.workload import Amounts, Flags, Numbers


@dataclass(frozen=True, slots=True)
class Rows:
    """Entries by key, one of each key."""

    keys: Numbers
    seqs: Amounts
    logical_bytes: Amounts
    tombstones: Flags

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, chosen: slice | Flags | Amounts) -> Rows:
        """Some of them."""
        return Rows(
            self.keys[chosen],
            self.seqs[chosen],
            self.logical_bytes[chosen],
            self.tombstones[chosen],
        )


def newest(parts: Sequence[Rows]) -> Rows:
    """The newest entry of each key in `parts`, which may be in any order, and not by key."""
    together = Rows(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.seqs for part in parts]),
        np.concatenate([part.logical_bytes for part in parts]),
        np.concatenate([part.tombstones for part in parts]),
    )
    ordered = together.at(np.lexsort((-together.seqs, together.keys)))
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered.keys[1:] != ordered.keys[:-1]
    return ordered.at(first)


def cut(rows: Rows, row_bytes: Amounts, part_bytes: int) -> Iterator[tuple[Rows, int]]:
    """The rows in parts of at most `part_bytes`, each with its size; `row_bytes` of each row."""
    ends = np.cumsum(row_bytes)
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + part_bytes, side="right")), start + 1)
        yield rows.at(slice(start, stop)), int(ends[stop - 1]) - before
        start = stop


def split(rows: Rows, keys: Numbers) -> Iterator[Rows]:
    """The rows before the first of `keys`, from there on before the second, and so on."""
    ends = [0, *np.searchsorted(rows.keys, keys), len(rows)]
    for start, stop in pairwise(ends):
        if start < stop:
            yield rows.at(slice(start, stop))
