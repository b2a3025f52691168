"""Entries: one version of one key, as memtable, WAL and levels hold it."""

from __future__ import annotations

import enum
from typing import NamedTuple

NO_EXPIRY = 0


class Kind(enum.IntEnum):
    """What an entry does to its key. The numbers are part of the SST format."""

    PUT = 1
    TOMBSTONE = 2
    RANGE_TOMBSTONE = 3  # key: first deleted, value: first not deleted (empty: no end)
    INGEST = 4  # key: id of a load of ready-made SSTs, value: which (a control record)
    MERGE = 5  # reserved: an operand of a merge


class Entry(NamedTuple):
    """One version of one key.

    A named tuple and not a dataclass because millions of these live at once and tuples sort,
    hash and unpack without Python code. `expire_at_ms` is logical time, 0 for never; from that
    moment on a put reads as a tombstone. A tombstone that has one was written because the put
    before it had expired then; to reads it is one like any other.
    """

    key: bytes
    seq: int
    kind: Kind
    value: bytes = b""
    expire_at_ms: int = NO_EXPIRY

    def is_visible(self, now_ms: int) -> bool:
        """Whether a read at logical time `now_ms` gets a value from this version."""
        return self.kind is Kind.PUT and not 0 < self.expire_at_ms <= now_ms
