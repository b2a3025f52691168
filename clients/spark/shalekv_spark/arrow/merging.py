"""Merges a window of several sorted sources, and finds the versions that a read sees.

The rules are those of every read: of the versions of a key the newest in the state counts. If it is
a tombstone, has expired, or is hidden by a range tombstone, no older version becomes visible (I2).

Keys are ordered without a comparison in Python. All keys of a window share the bytes that the least
and the greatest share. The eight bytes after those are a number, and numbers are sorted fast,
especially when they are few sorted runs one behind the other. Only keys with equal numbers are
compared as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shalekv.protocol.entry import NO_EXPIRY, Kind, RangeTombstones
from shalekv_spark.arrow.rows import Bools, Numbers, Order, Rows, bools_of, joined, numbers_array

_WORD_BYTES = 8
# The mask at index n keeps the first n bytes of a big-endian number.
_MASKS = np.array(
    [(1 << 64) - (1 << 8 * (_WORD_BYTES - count)) for count in range(_WORD_BYTES + 1)], np.uint64
)

_FEW = 64  # rows of the largest part for each row inserted from the others, which takes 6 us


def merged_order(keys: pa.BinaryArray, least: bytes, greatest: bytes) -> tuple[Order, Bools]:
    """Return the order in which the keys ascend, and which of them, in it, repeat the key before.

    Equal keys keep their order. REQUIRES: no key is below `least` or above `greatest`, and there is
    at least one key.
    """
    shared = _shared_bytes(least, greatest)
    words, lengths = _words(keys, shared)
    order = np.argsort(words, kind="stable")
    ordered = words[order]
    repeats = np.zeros(len(order), np.bool_)
    np.equal(ordered[1:], ordered[:-1], out=repeats[1:])
    if not repeats.any() or _is_whole(lengths, shared):
        return order, repeats
    tied = repeats.copy()
    tied[:-1] |= repeats[1:]
    rows = order[tied]
    found = keys.take(numbers_array(rows, pa.int64()))
    if not _is_sorted(found):
        within = pc.sort_indices(found)
        order[tied] = rows[np.frombuffer(within.buffers()[1], np.uint64, len(within))]
        found = found.take(within)
    same = np.zeros(len(rows), np.bool_)
    same[1:] = bools_of(pc.equal(found.slice(1), found.slice(0, len(found) - 1)))
    repeats[tied] = same
    return order, repeats


def spliced_order(rows: Rows, few: Sequence[Rows], least: int) -> tuple[Order, Bools]:
    """Return the same for the keys of `rows` and far fewer others, which are inserted one by one.

    In the numbering of the order, `rows` begin at `least`; the rows of `few` are before and behind
    them.
    """
    count = len(rows) + sum(map(len, few))
    others = [*range(least), *range(least + len(rows), count)]
    keys = [key for each in few for key in each.keys.to_pylist()]
    ranks = sorted(range(len(keys)), key=keys.__getitem__)
    inner = repeated(rows.keys)
    repeats = np.zeros(len(rows), np.bool_) if inner is None else inner
    places, own, at, last_key = [], [], 0, None
    for rank in ranks:
        key = keys[rank]
        at = rows.first_from(key, at)
        places.append(at)
        own.append(key == last_key)
        if at < len(rows) and rows.key(at) == key:
            repeats[at] = True
        last_key = key
    order = np.arange(least, least + len(rows), dtype=np.intp)
    found = np.array(others, np.intp)[ranks]
    return np.insert(order, places, found), np.insert(repeats, places, own)


def repeated(keys: pa.BinaryArray) -> Bools | None:
    """Return which of these sorted keys repeat the key before; None: none does."""
    before, after = keys.slice(0, max(len(keys) - 1, 0)), keys.slice(1)
    equal = pc.equal(after, before)
    if not pc.any(equal, min_count=0).as_py():
        return None
    repeats = np.zeros(len(keys), np.bool_)
    repeats[1:] = bools_of(equal)
    return repeats


def _shared_bytes(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    differs = (at for at, (left, right) in enumerate(pairs) if left != right)
    return next(differs, min(len(one), len(other)))


def _words(keys: pa.BinaryArray, at: int) -> tuple[Numbers, Order]:
    """Return eight bytes of each key from byte `at` on, as a number, and the lengths of the keys.

    A key that ends earlier is filled with zeros.
    """
    count = len(keys)
    offsets = np.frombuffer(keys.buffers()[1], np.int32, count + 1, 4 * keys.offset)
    offsets = offsets.astype(np.intp)
    end = int(offsets[-1])
    data = np.zeros(end + _WORD_BYTES, np.uint8)
    if end:
        data[:end] = np.frombuffer(keys.buffers()[2], np.uint8, end)
    # A number begins at every byte.
    numbers: Numbers = np.ndarray((end + 1,), np.dtype(">u8"), data, strides=(1,))
    lengths = offsets[1:] - offsets[:-1]
    words = numbers[np.minimum(offsets[:-1] + at, end)].astype(np.uint64)
    present = lengths - at
    if present.min() < _WORD_BYTES:
        words &= _MASKS[np.clip(present, 0, _WORD_BYTES)]
    return words, lengths


def _is_whole(lengths: Order, shared: int) -> bool:
    """Return whether keys with equal numbers are equal."""
    longest = int(lengths.max())
    return longest <= shared + _WORD_BYTES and longest == int(lengths.min())


def _is_sorted(keys: pa.BinaryArray) -> bool:
    ascends = pc.less_equal(keys.slice(0, len(keys) - 1), keys.slice(1))
    is_sorted: bool = pc.all(ascends).as_py()
    return is_sorted


@dataclass(frozen=True, slots=True)
class SourceRows:
    """One or more rows of one source, by key; versions of one key are newest first."""

    rows: Rows
    first_key: bytes
    last_key: bytes


@dataclass(frozen=True, slots=True)
class MergeState:
    """The state that a scan reads."""

    now_ms: int
    all_versions: bool
    tombstones: RangeTombstones


def newest_versions(rows: Rows) -> Rows:
    """Return the newest version of each key of one source."""
    repeats = repeated(rows.keys)
    return rows if repeats is None else rows.kept(~repeats)


def merge_window(
    window: Sequence[SourceRows], state: MergeState
) -> Iterator[tuple[Rows, Bools | None]]:
    """Return the rows that a scan returns of a window of keys, in order, and which are live.

    None: all are live. `window` has all rows of the window: the parts of each source follow one
    another. Unless the scan returns all versions, each part has each key once.
    """
    parts = sorted(window, key=attrgetter("first_key", "last_key"))
    group: list[SourceRows] = []
    last_key = b""
    for part in parts:
        if group and part.first_key > last_key:
            yield _merged(group, state)
            group = []
        last_key = max(last_key, part.last_key) if group else part.last_key
        group.append(part)
    if group:
        yield _merged(group, state)


def _merged(group: Sequence[SourceRows], state: MergeState) -> tuple[Rows, Bools | None]:
    """Merge parts that may overlap."""
    rows = joined([part.rows for part in group])
    if len(group) == 1:
        repeats = repeated(rows.keys) if state.all_versions else None
        live = _live(rows, repeats, state)
        return _chosen(rows, live, state)
    order, repeats = _order(group, rows)
    _newest_first(order, repeats, rows)
    if not state.all_versions and repeats.any():
        order, repeats = order[~repeats], np.empty(0, np.bool_)
    return _picked(rows, order, repeats if state.all_versions else None, state)


def _order(group: Sequence[SourceRows], rows: Rows) -> tuple[Order, Bools]:
    """Return the order of `rows`, those of all parts, and which repeat the key before."""
    sizes = [len(part.rows) for part in group]
    largest = sizes.index(max(sizes))
    if (len(rows) - sizes[largest]) * _FEW < sizes[largest]:
        few = [part.rows for part in (*group[:largest], *group[largest + 1 :])]
        return spliced_order(group[largest].rows, few, sum(sizes[:largest]))
    least, greatest = group[0].first_key, max(part.last_key for part in group)
    return merged_order(rows.keys, least, greatest)


def _newest_first(order: Order, repeats: Bools, rows: Rows) -> None:
    """Sort the versions of each key by sequence number, newest first."""
    at = np.flatnonzero(repeats)
    if not len(at) or (rows.seqs[order[at - 1]] >= rows.seqs[order[at]]).all():
        return
    tied = repeats.copy()
    tied[:-1] |= repeats[1:]
    versions = order[tied]
    key_numbers = np.cumsum(~repeats)[tied]
    order[tied] = versions[np.lexsort((~rows.seqs[versions], key_numbers))]


def _picked(
    rows: Rows, order: Order, repeats: Bools | None, state: MergeState
) -> tuple[Rows, Bools | None]:
    """Return the rows in this order. Values are copied once, and only those that are returned."""
    ordered = Rows(
        rows.keys.take(numbers_array(order, pa.int64())),
        None,
        rows.seqs[order],
        None if rows.kinds is None else rows.kinds[order],
        None if rows.expire_at_ms is None else rows.expire_at_ms[order],
    )
    live = _live(ordered, repeats, state)
    if live is not None and not state.all_versions:
        order = order[live]
    picked, live = _chosen(ordered, live, state)
    if rows.values is None:
        return picked, live
    values = rows.values.take(numbers_array(order, pa.int64()))
    return Rows(picked.keys, values, picked.seqs, picked.kinds, picked.expire_at_ms), live


def _chosen(rows: Rows, live: Bools | None, state: MergeState) -> tuple[Rows, Bools | None]:
    if live is None or state.all_versions:
        return rows, live
    return rows.kept(live), None


def _live(rows: Rows, repeats: Bools | None, state: MergeState) -> Bools | None:
    """Return which of these sorted rows a read sees; None: all. `repeats` None: no key repeats."""
    live = None if repeats is None else ~repeats
    if rows.kinds is not None:
        live = _both(live, rows.kinds == Kind.PUT)
    if rows.expire_at_ms is not None:
        at_ms = rows.expire_at_ms
        live = _both(live, (at_ms == NO_EXPIRY) | (at_ms > np.uint64(state.now_ms)))
    if len(state.tombstones):
        live = _both(live, _unhidden(rows, state.tombstones))
    return live


def _unhidden(rows: Rows, tombstones: RangeTombstones) -> Bools | None:
    """Return which rows no range tombstone hides; None: all."""
    if not len(rows):
        return None
    fragments = tombstones.between(rows.key(0), rows.key(len(rows) - 1) + b"\x00")
    live = np.ones(len(rows), np.bool_)
    for start, end, seq in fragments:
        low, high = rows.first_from(start), rows.first_from(end)
        live[low:high] &= rows.seqs[low:high] >= np.uint64(seq)
    return None if live.all() else live


def _both(one: Bools | None, other: Bools | None) -> Bools | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other
