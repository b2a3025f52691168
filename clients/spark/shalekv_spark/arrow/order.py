"""The order of keys that come from several sorted sources, without a comparison in Python.

All keys of a window have what the least and the greatest have in common. The eight bytes after that
are a number, and numbers are sorted fast, the more so as they are few sorted runs one after the
other. Only keys whose numbers are equal are compared whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shalekv_spark.arrow.rows import Bools, Numbers, Order, Rows, bools_of, numbers_array

_WORD_BYTES = 8
# Of a big-endian number, so many bytes from the left.
_MASKS = np.array(
    [(1 << 64) - (1 << 8 * (_WORD_BYTES - count)) for count in range(_WORD_BYTES + 1)], np.uint64
)


def merged_order(keys: pa.BinaryArray, least: bytes, greatest: bytes) -> tuple[Order, Bools]:
    """The order in which the keys ascend, and which of them, in that order, repeat the key before.

    Equal keys keep the order in which they stand. No key is below `least` or above `greatest`;
    there is one key or more.
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
    """The same for the keys of `rows` and of much fewer others, which are looked for one by one.

    Of the rows that it is an order of, `rows` begin at `least`, and `few` fill what is before and
    behind them.
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
    """Which of these keys, which are in order, repeat the key before; None: none does."""
    before, after = keys.slice(0, max(len(keys) - 1, 0)), keys.slice(1)
    equal = pc.equal(after, before)
    if not pc.any(equal, min_count=0).as_py():
        return None
    repeats = np.zeros(len(keys), np.bool_)
    repeats[1:] = bools_of(equal)
    return repeats


def _shared_bytes(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    pairs = zip(one, other, strict=False)
    differs = (at for at, (left, right) in enumerate(pairs) if left != right)
    return next(differs, min(len(one), len(other)))


def _words(keys: pa.BinaryArray, at: int) -> tuple[Numbers, Order]:
    """Eight bytes of each key from byte `at` on, as a number, and the lengths of the keys.

    Where a key ends before, zeros follow.
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
    """Whether keys are equal if their numbers are."""
    longest = int(lengths.max())
    return longest <= shared + _WORD_BYTES and longest == int(lengths.min())


def _is_sorted(keys: pa.BinaryArray) -> bool:
    ascends = pc.less_equal(keys.slice(0, len(keys) - 1), keys.slice(1))
    is_sorted: bool = pc.all(ascends).as_py()
    return is_sorted
