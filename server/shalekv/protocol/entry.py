"""Entries, the versions of keys in memtable, WAL and levels, and ranges of keys."""

from __future__ import annotations

import enum
from typing import NamedTuple

NO_EXPIRY = 0
KEY_BYTES_MAX = 64 * 1024  # part of the API, not a setting
END_OF_KEYS = b"\xff" * (KEY_BYTES_MAX + 1)  # above every key: stands for a missing upper bound


class Kind(enum.IntEnum):
    """The effect of an entry on its key. The numbers are part of the SST format."""

    PUT = 1
    TOMBSTONE = 2
    RANGE_TOMBSTONE = 3  # key: first deleted, value: first not deleted (empty: no end)
    INGEST = 4  # a control record; key: id of a load of ready-made SSTs, value: the SSTs
    MERGE = 5  # reserved: an operand of a merge


class Entry(NamedTuple):
    """One version of one key.

    It is a named tuple and not a dataclass because millions of them exist at once, and tuples sort,
    hash and unpack without Python code. `expire_at_ms` is logical time, 0 for never; from then on a
    put reads as a tombstone. A tombstone with `expire_at_ms` was written by the sweep of expired
    keys, because the put before it had expired then. Reads treat it like any other tombstone.
    """

    key: bytes
    seq: int
    kind: Kind
    value: bytes = b""
    expire_at_ms: int = NO_EXPIRY

    def is_visible(self, now_ms: int) -> bool:
        """Whether a read at logical time `now_ms` gets a value from this version."""
        return self.kind is Kind.PUT and not 0 < self.expire_at_ms <= now_ms


class KeyRange(NamedTuple):
    """The keys from `start` on and before `end`; an empty `end` is no bound."""

    start: bytes
    end: bytes

    @property
    def is_empty(self) -> bool:
        """Whether the range contains no key."""
        return bool(self.end) and self.start >= self.end


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`; empty: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b""


def coalesced(ranges: list[KeyRange]) -> list[KeyRange]:
    """Return the same keys in the fewest ranges, in order."""
    merged: list[KeyRange] = []
    for start, end in sorted(ranges):
        if merged and (not merged[-1].end or start <= merged[-1].end):
            last = merged[-1]
            if last.end and (not end or end > last.end):
                merged[-1] = KeyRange(last.start, end)
        else:
            merged.append(KeyRange(start, end))
    return merged
