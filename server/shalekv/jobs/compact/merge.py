"""Merging rows of several sources, column by column: the newest version of each key is kept.

A Python loop costs a microsecond for each entry. Here, dictionaries, `sorted` and `itertools` loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from operator import eq, itemgetter, ne
from typing import TypeVar

from shalekv.format.columns import NO_ROWS, Columns
from shalekv.protocol.compaction.jobs import OlderKeys
from shalekv.protocol.entry import NO_EXPIRY, Fragment, Kind

T = TypeVar("T")

_TOMBSTONE = int(Kind.TOMBSTONE)


def newest(newest_first: Sequence[Columns]) -> Columns:
    """Merge the rows of these sources by key; the first source that has a key provides its row.

    REQUIRES: each source has each key once, see `first_versions`.
    """
    filled = [columns for columns in newest_first if columns.keys]
    if len(filled) < 2:  # noqa: PLR2004 - one source has nothing to merge with
        return filled[0] if filled else NO_ROWS
    rows: dict[bytes, int] = {}
    end = 0
    oldest_first = filled[::-1]
    for columns in oldest_first:
        start, end = end, end + len(columns.keys)
        rows.update(zip(columns.keys, range(start, end), strict=True))
    keys = sorted(rows)
    if len(keys) == 1:
        return filled[0]
    order = [*map(rows.__getitem__, keys)]
    return Columns(
        keys,
        _select(order, [*chain.from_iterable(columns.seqs for columns in oldest_first)]),
        bytes(_select(order, b"".join([columns.kinds for columns in oldest_first]))),
        _select(order, [*chain.from_iterable(columns.values for columns in oldest_first)]),
        _select(order, [*chain.from_iterable(columns.expire_at_ms for columns in oldest_first)]),
    )


def first_versions(columns: Columns) -> Columns:
    """Return the newest version of each key. REQUIRES: rows are by key, then newest first."""
    keys = columns.keys
    if not any(map(eq, keys, islice(keys, 1, None))):
        return columns
    return _kept(columns, chain((True,), map(ne, islice(keys, 1, None), keys)))


def visible(columns: Columns, fragments: Iterable[Fragment]) -> Columns:
    """Return the rows that none of these range tombstones hides. REQUIRES: rows are by key."""
    keys, seqs = columns.keys, columns.seqs
    hidden: list[int] = []
    for start, end, seq in fragments:
        low = bisect_left(keys, start)
        high = bisect_left(keys, end, low)
        hidden += [row for row in range(low, high) if seqs[row] < seq]
    return _without(columns, hidden)


def remaining(columns: Columns, older: OlderKeys, now_ms: int) -> Columns:
    """Drop the tombstones of keys that have no older version left to hide (I2).

    `older` are the keys that may have one. Puts that have expired at `now_ms` of logical time are
    turned into tombstones first.
    """
    kinds = columns.kinds
    if any(columns.expire_at_ms):
        columns = _expired(columns, now_ms)
        kinds = columns.kinds
    if _TOMBSTONE not in kinds:
        return columns
    keys = columns.keys
    is_needed = older.may_hold
    dropped = [row for row in _rows_of(_TOMBSTONE, kinds) if not is_needed(keys[row])]
    return _without(columns, dropped)


def _expired(columns: Columns, now_ms: int) -> Columns:
    """Replace the puts that have expired with tombstones."""
    keys, seqs, kinds, values, expiries = columns
    expired = [
        row
        for row, at_ms in enumerate(expiries)
        if NO_EXPIRY < at_ms <= now_ms and kinds[row] == Kind.PUT
    ]
    if not expired:
        return columns
    new_kinds, new_values, new_expiries = bytearray(kinds), [*values], [*expiries]
    for row in expired:
        new_kinds[row] = _TOMBSTONE
        new_values[row] = b""
        new_expiries[row] = NO_EXPIRY
    return Columns(keys, seqs, bytes(new_kinds), new_values, new_expiries)


def _rows_of(kind: int, kinds: bytes) -> Iterator[int]:
    row = kinds.find(kind)
    while row >= 0:
        yield row
        row = kinds.find(kind, row + 1)


def _without(columns: Columns, dropped: Sequence[int]) -> Columns:
    if not dropped:
        return columns
    kept = bytearray(b"\x01") * len(columns.keys)
    for row in dropped:
        kept[row] = 0
    return _kept(columns, kept)


def _kept(columns: Columns, kept: Iterable[object]) -> Columns:
    selectors = [*kept]
    keys, seqs, kinds, values, expire_at_ms = columns
    return Columns(
        [*compress(keys, selectors)],
        [*compress(seqs, selectors)],
        bytes(compress(kinds, selectors)),
        [*compress(values, selectors)],
        [*compress(expire_at_ms, selectors)],
    )


def _select(rows: Sequence[int], column: Sequence[T]) -> Sequence[T]:
    """Select these rows of a column; there are two or more."""
    selected: Sequence[T] = itemgetter(*rows)(column)
    return selected
