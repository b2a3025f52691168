"""What a window of several sources amounts to: versions in order, and which of them count.

The rules are those of every read: of the versions of a key the newest that the state holds counts,
and if it is a tombstone, has expired, or is hidden by a range tombstone, then no older one comes to
light (I2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import pyarrow as pa

from shalekv.protocol.entry import NO_EXPIRY, Kind
from shalekv.protocol.range_tombstones import RangeTombstones
from shalekv_spark.arrow.order import merged_order, repeated, spliced_order
from shalekv_spark.arrow.rows import Bools, Order, Rows, joined, numbers_array

_FEW = 64  # rows of the largest part, for each of which another is looked for: 6 us


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one source, one or more, by key, and versions of one key newest first."""

    rows: Rows
    first_key: bytes
    last_key: bytes


@dataclass(frozen=True, slots=True)
class State:
    """What a scan looks at."""

    now_ms: int
    all_versions: bool
    tombstones: RangeTombstones


def newest_versions(rows: Rows) -> Rows:
    """The newest version of each key of one source."""
    repeats = repeated(rows.keys)
    return rows if repeats is None else rows.kept(~repeats)


def shown(window: Sequence[Part], state: State) -> Iterator[tuple[Rows, Bools | None]]:
    """The rows that a scan shows of a window of keys, in order, and which of them are live.

    None: all are. `window` are all rows of the window, of each source those that follow one
    another. Unless the scan shows all versions, each part has each key once.
    """
    parts = sorted(window, key=attrgetter("first_key", "last_key"))
    group: list[Part] = []
    last_key = b""
    for part in parts:
        if group and part.first_key > last_key:
            yield _merged(group, state)
            group = []
        last_key = max(last_key, part.last_key) if group else part.last_key
        group.append(part)
    if group:
        yield _merged(group, state)


def _merged(group: Sequence[Part], state: State) -> tuple[Rows, Bools | None]:
    """The rows of parts that may overlap."""
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


def _order(group: Sequence[Part], rows: Rows) -> tuple[Order, Bools]:
    """The order of `rows`, which are those of all parts, and which repeat the key before."""
    sizes = [len(part.rows) for part in group]
    largest = sizes.index(max(sizes))
    if (len(rows) - sizes[largest]) * _FEW < sizes[largest]:
        few = [part.rows for part in (*group[:largest], *group[largest + 1 :])]
        return spliced_order(group[largest].rows, few, sum(sizes[:largest]))
    least, greatest = group[0].first_key, max(part.last_key for part in group)
    return merged_order(rows.keys, least, greatest)


def _newest_first(order: Order, repeats: Bools, rows: Rows) -> None:
    """Put the versions of each key into the order of their numbers."""
    at = np.flatnonzero(repeats)
    if not len(at) or (rows.seqs[order[at - 1]] >= rows.seqs[order[at]]).all():
        return
    tied = repeats.copy()
    tied[:-1] |= repeats[1:]
    versions = order[tied]
    key_numbers = np.cumsum(~repeats)[tied]
    order[tied] = versions[np.lexsort((~rows.seqs[versions], key_numbers))]


def _picked(
    rows: Rows, order: Order, repeats: Bools | None, state: State
) -> tuple[Rows, Bools | None]:
    """The rows in this order. Values are copied once, and those that are not shown not at all."""
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


def _chosen(rows: Rows, live: Bools | None, state: State) -> tuple[Rows, Bools | None]:
    if live is None or state.all_versions:
        return rows, live
    return rows.kept(live), None


def _live(rows: Rows, repeats: Bools | None, state: State) -> Bools | None:
    """Which of these rows a read sees; None: all. They are in order; `repeats` None: none does."""
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
    """Which rows no range tombstone hides; None: all."""
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
