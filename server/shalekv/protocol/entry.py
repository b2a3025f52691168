"""Entries, the versions of keys in memtable, WAL and levels; ranges of keys; range tombstones."""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

NO_EXPIRY = 0
NEVER_MS = 2**64 - 1  # after every logical time
KEY_BYTES_MAX = 64 * 1024  # part of the API, not a setting
END_OF_KEYS = b"\xff" * (KEY_BYTES_MAX + 1)  # above every key: used where there is no upper bound
FRAGMENT_BYTES = 240  # measured size of the objects and list slots of a fragment, without its keys


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
        """Return whether a read at logical time `now_ms` gets a value from this version."""
        return self.kind is Kind.PUT and not 0 < self.expire_at_ms <= now_ms


class KeyRange(NamedTuple):
    """The keys from `start` on and before `end`; an empty `end` is no bound."""

    start: bytes
    end: bytes

    @property
    def is_empty(self) -> bool:
        """Return whether the range contains no key."""
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


class Fragment(NamedTuple):
    """A range of keys from `start` on and before `end`, in which entries below `seq` are hidden."""

    start: bytes
    end: bytes  # `END_OF_KEYS`: no bound
    seq: int


class RangeTombstones:
    """The combined effect of some range tombstones.

    Range tombstones may overlap, and only the newest over a key matters. So they are kept as
    fragments that do not overlap, in the order of their keys, which one bisection finds. The value
    is immutable: a scan that holds one reads one state while range deletes go on.
    """

    __slots__ = ("_fragments", "_starts", "size_bytes")

    def __init__(
        self,
        fragments: Sequence[Fragment] = (),
        starts: Sequence[bytes] = (),
        size_bytes: int = 0,
    ) -> None:
        """Hold `fragments`, with their starts and their total size.

        REQUIRES: `fragments` are in order and do not overlap.
        """
        self._fragments = fragments
        self._starts = starts
        self.size_bytes = size_bytes

    def __len__(self) -> int:
        """Return the number of fragments."""
        return len(self._fragments)

    @property
    def fragments(self) -> Sequence[Fragment]:
        """All fragments, in order."""
        return self._fragments

    def with_added(self, tombstones: Iterable[Entry]) -> Self:
        """Return these and more tombstones. For every key the greatest sequence number counts.

        The cost is two copies of lists, and some work for each fragment that changes.
        """
        fragments = list(self._fragments)
        starts = list(self._starts)
        size_bytes = self.size_bytes
        for tombstone in tombstones:
            new = Fragment(tombstone.key, tombstone.value or END_OF_KEYS, tombstone.seq)
            # Replace the fragments from the first that ends after the start to the last that begins
            # before the end.
            low = bisect_right(starts, new.start)
            if low and fragments[low - 1].end > new.start:
                low -= 1
            high = bisect_left(starts, new.end, low)
            pieces = _overlaid(fragments[low:high], new)
            size_bytes += _size_bytes(pieces) - _size_bytes(fragments[low:high])
            fragments[low:high] = pieces
            starts[low:high] = [piece.start for piece in pieces]
        return type(self)(fragments, starts, size_bytes)

    def over(self, key: bytes) -> Fragment | None:
        """Return the fragment that contains `key`; None if there is none."""
        at = bisect_right(self._starts, key) - 1
        if at < 0:
            return None
        fragment = self._fragments[at]
        return fragment if key < fragment.end else None

    def between(self, start: bytes, end: bytes) -> Sequence[Fragment]:
        """Return the fragments with keys from `start` on and before `end` (or `END_OF_KEYS`)."""
        low = bisect_right(self._starts, start)
        if low and self._fragments[low - 1].end > start:
            low -= 1
        return self._fragments[low : bisect_left(self._starts, end, low)]

    def latest(self, key: bytes, found: Entry | None) -> Entry | None:
        """Return the newest version of `key`: `found`, or a tombstone if one of these is newer."""
        fragment = self.over(key)
        if fragment is None or (found is not None and found.seq >= fragment.seq):
            return found
        return Entry(key, fragment.seq, Kind.TOMBSTONE)

    def hides(self, entry: Entry) -> bool:
        """Return whether one of these deletes `entry`. Entries of the same commit are not
        deleted.
        """
        fragment = self.over(entry.key)
        return fragment is not None and entry.seq < fragment.seq

    def visible(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries that are not hidden. `entries` are by key, in either direction."""
        if not entries or not self._fragments:
            return entries
        first, last = sorted((entries[0].key, entries[-1].key))
        low = bisect_right(self._starts, first)
        begins_inside = low > 0 and self._fragments[low - 1].end > first
        if not begins_inside and bisect_right(self._starts, last) == low:
            return entries  # no fragment overlaps the range of the entries
        return [entry for entry in entries if not self.hides(entry)]


NO_RANGE_TOMBSTONES = RangeTombstones()


def _size_bytes(fragments: Sequence[Fragment]) -> int:
    return sum([FRAGMENT_BYTES + len(f.start) + len(f.end) % len(END_OF_KEYS) for f in fragments])


def _overlaid(old: Sequence[Fragment], new: Fragment) -> list[Fragment]:
    """Lay `new` over the fragments `old`, all of which it overlaps, and join equal neighbours."""
    pieces: list[Fragment] = []
    at = new.start
    for fragment in old:
        if fragment.start < new.start:
            _append(pieces, Fragment(fragment.start, new.start, fragment.seq))
        if at < fragment.start:
            _append(pieces, Fragment(at, fragment.start, new.seq))
        start, end = max(fragment.start, new.start), min(fragment.end, new.end)
        _append(pieces, Fragment(start, end, max(fragment.seq, new.seq)))
        if fragment.end > new.end:
            _append(pieces, Fragment(new.end, fragment.end, fragment.seq))
        at = end
    if at < new.end:
        _append(pieces, Fragment(at, new.end, new.seq))
    return pieces


def _append(pieces: list[Fragment], piece: Fragment) -> None:
    if pieces and pieces[-1].seq == piece.seq and pieces[-1].end == piece.start:
        pieces[-1] = Fragment(pieces[-1].start, piece.end, piece.seq)
    else:
        pieces.append(piece)
