"""Rows of NDJSON: a JSON object on each line, two of whose members are key and value.

A member that is called ``key`` or ``value`` (or as the user says) is text; ``key_hex``,
``key_base64`` and ``key_escaped`` are binary, whatever the bytes. A number stands for its digits,
and what is neither text nor a number for its compact JSON. ``expire_at_ms`` keeps the expiry, in
milliseconds since the Unix epoch. Other members are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from shalekv.cli.console.keys import Encoding, json_field
from shalekv.cli.load.lines import (
    BYTE_ORDER_MARK,
    BadRow,
    Lines,
    Row,
    key_problem,
    without_end,
)
from shalekv.cli.pairs.columns import KEY, VALUE, Columns, spellings
from shalekv_client import Entry, Put

EXPIRY = "expire_at_ms"
EXPIRY_MAX = 2**64 - 1  # in milliseconds

compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class NdjsonRows:
    """Reads objects; `columns` name the two members."""

    def __init__(
        self, lines: Lines, columns: Columns, *, ttl_ms: int, now_ms: Callable[[], int]
    ) -> None:
        """Every pair gets `ttl_ms`; 0: what its object says, which `now_ms` is asked for."""
        self.lines = lines
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._keys = spellings(columns.key or KEY, columns.encoding)
        self._values = spellings(columns.value or VALUE, columns.encoding)

    def begin(self) -> None:
        """Nothing comes before the first row."""

    def rows(self) -> Iterator[Row]:
        """The pairs, and what is not one."""
        for line in self.lines:
            try:
                yield self._put(line)
            except (ValueError, RecursionError) as error:
                yield BadRow(self.lines.number, str(error), without_end(line))

    def _put(self, line: bytes) -> Put | None:
        if self.lines.number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.isspace():
            return None
        members = _members(line)
        key = _cell(members, self._keys)
        problem = key_problem(key)
        if problem:
            raise ValueError(problem)
        value = _cell(members, self._values)
        if self._ttl_ms or not members.get(EXPIRY):
            return Put(key, value, self._ttl_ms)
        expire_at_ms = members[EXPIRY]
        if type(expire_at_ms) is not int or expire_at_ms > EXPIRY_MAX:
            raise ValueError(f"'{EXPIRY}' is no number of milliseconds, or too large")
        # What has expired meanwhile expires at once: it hides what the key had before.
        return Put(key, value, max(1, expire_at_ms - self._now_ms()))


def row_of(entry: Entry, encoding: Encoding) -> str:
    """The line of `entry`, without its end."""
    members: dict[str, Any] = {
        **json_field(KEY, entry.key, encoding),
        **json_field(VALUE, entry.value, encoding),
    }
    if entry.expire_at_ms is not None:
        members[EXPIRY] = entry.expire_at_ms
    return compact_json(members)


def _members(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        problem = "it is not UTF-8; what is binary belongs into key_hex, value_base64 and so on"
        raise ValueError(problem) from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object: {...}")  # noqa: TRY004 (of the row, not of a call)
    return found


def _cell(members: dict[str, Any], names: list[tuple[str, Encoding]]) -> bytes:
    """The bytes of the first of `names` that is there."""
    for name, encoding in names:
        cell = members.get(name)
        if cell is None:
            continue
        if encoding is Encoding.TEXT:
            text = cell if type(cell) is str else compact_json(cell)
            return _utf8(text, name)
        if type(cell) is not str:
            raise ValueError(f"'{name}' is no text in {encoding.value}")
        return encoding.decode(cell)
    raise ValueError(f"it has no '{names[0][0]}'")


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"'{name}' has half of a surrogate pair, which is no character") from None
