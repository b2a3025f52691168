"""The rows of a load, judged before they are written: order, keys, values, kinds."""

from __future__ import annotations

from itertools import compress, islice
from operator import lt
from typing import Protocol

from shalekv.errors import InvalidRequest
from shalekv.format.coding import MAX_U64
from shalekv.format.columns import Columns
from shalekv.format.contents import UNNUMBERED
from shalekv.protocol.entry import NO_EXPIRY, Kind

SHOWN_BYTES = 40  # of a key in an error
_KINDS = bytes((Kind.PUT, Kind.TOMBSTONE))
_IS_TOMBSTONE = bytes(number == Kind.TOMBSTONE for number in range(256))


class RowLimits(Protocol):
    """How large keys and values may be, bytes."""

    @property
    def key_bytes_max(self) -> int: ...

    @property
    def value_bytes_max(self) -> int: ...


def check_rows(rows: Columns, limits: RowLimits, first_row: int, last_key: bytes) -> None:
    """Raise `InvalidRequest`, which names the row and its key, unless these can be a load's next.

    They are counted from `first_row` on; `last_key` is that of the row before, empty if there is
    none. REQUIRES: there is a row. About 150 ns for a row.
    """
    found = (
        _bad_order(rows, last_key)
        or _bad_key(rows, limits.key_bytes_max)
        or _bad_value(rows, limits.value_bytes_max)
        or _bad_kind(rows)
    )
    if found is not None:
        at, field, problem = found
        raise InvalidRequest(f"rows[{first_row + at}].{field}", problem)


def shown_key(key: bytes) -> str:
    """A key in an error: the beginning of a long one."""
    if len(key) <= SHOWN_BYTES:
        return repr(key)
    return f"{key[:SHOWN_BYTES]!r}... ({len(key):,} bytes)"


def _bad_order(rows: Columns, last_key: bytes) -> tuple[int, str, str] | None:
    keys = rows.keys
    if keys[0] > last_key and all(map(lt, keys, islice(keys, 1, None))):
        return None
    before = last_key
    for at, key in enumerate(keys):
        if key < before:
            problem = f"rows are not sorted: key {shown_key(key)} stands after {shown_key(before)}"
            return at, "key", problem
        if key == before and key:
            problem = f"key {shown_key(key)} stands twice: a load has one row for each key"
            return at, "key", problem
        before = key
    return None


def _bad_key(rows: Columns, bytes_max: int) -> tuple[int, str, str] | None:
    lengths = [*map(len, rows.keys)]
    if not min(lengths):
        return lengths.index(0), "key", "a key must not be empty"
    longest = max(lengths)
    if longest <= bytes_max:
        return None
    at = lengths.index(longest)
    problem = f"key {shown_key(rows.keys[at])}: {longest:,} bytes, and a key has {bytes_max:,} at "
    return at, "key", f"{problem}most"


def _bad_value(rows: Columns, bytes_max: int) -> tuple[int, str, str] | None:
    lengths = [*map(len, rows.values)]
    longest = max(lengths)
    if longest <= bytes_max:
        return None
    at = lengths.index(longest)
    problem = f"value of key {shown_key(rows.keys[at])}: {longest:,} bytes, and a value has "
    return at, "value", f"{problem}{bytes_max:,} at most"


def _bad_kind(rows: Columns) -> tuple[int, str, str] | None:
    if rows.kinds.translate(None, _KINDS):
        at = next(at for at, kind in enumerate(rows.kinds) if kind not in _KINDS)
        problem = f"key {shown_key(rows.keys[at])}: a load holds puts and deletes, nothing else"
        return at, "kind", problem
    if any(rows.seqs):
        at = next(at for at, seq in enumerate(rows.seqs) if seq != UNNUMBERED)
        problem = f"key {shown_key(rows.keys[at])}: its commit will give it one: leave it 0"
        return at, "seq", problem
    earliest_ms, latest_ms = min(rows.expire_at_ms), max(rows.expire_at_ms)
    if earliest_ms < NO_EXPIRY or latest_ms > MAX_U64:
        wrong_ms = earliest_ms if earliest_ms < NO_EXPIRY else latest_ms
        at = [*rows.expire_at_ms].index(wrong_ms)
        problem = f"key {shown_key(rows.keys[at])}: {wrong_ms} is no time"
        return at, "expire_at_ms", problem
    if rows.kinds.count(Kind.PUT) == len(rows.kinds):
        return None
    tombstones = rows.kinds.translate(_IS_TOMBSTONE)
    if any(compress(rows.values, tombstones)) or any(compress(rows.expire_at_ms, tombstones)):
        at = next(
            at
            for at, is_delete in enumerate(tombstones)
            if is_delete and (rows.values[at] or rows.expire_at_ms[at])
        )
        problem = f"key {shown_key(rows.keys[at])}: a delete has no value, and does not expire"
        return at, "value", problem
    return None
