"""How events of a watch are printed: a line for each change, or one object for each commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shalekv.cli.console.keys import Encoding, json_field
from shalekv.cli.console.output import Format, TablePrinter, print_json, print_line
from shalekv_client import ChangeKind, WatchChange, WatchCommit, WatchEvent

COLUMNS = ("seq", "change", "key", "value")
PREVIOUS = "previous"
UNKNOWN = "?"  # a value before that nobody knows


class EventPrinter:
    """Prints events one by one."""

    def __init__(
        self,
        encoding: Encoding,
        output_format: Format,
        *,
        has_previous: bool,
        shows_progress: bool,
    ) -> None:
        """`has_previous`: the values before were asked for."""
        self._encoding = encoding
        self._format = output_format
        self._has_previous = has_previous
        self._shows_progress = shows_progress
        columns = (*COLUMNS, PREVIOUS) if has_previous else COLUMNS
        self._table = TablePrinter(columns)

    def print(self, event: WatchEvent) -> None:
        """Print a commit, or how far all was told if that is wanted."""
        if isinstance(event, WatchCommit):
            self._print_commit(event)
        elif self._shows_progress:
            if self._format is Format.JSON:
                print_json({"progress_seq": event.seq})
            else:
                self._print_rows([self._row(event.seq, "progress", "", "", "")])

    def _print_commit(self, commit: WatchCommit) -> None:
        if self._format is Format.JSON:
            changes = [self._record(change) for change in commit.changes]
            print_json({"seq": commit.seq, "wal_id": commit.wal_id, "changes": changes})
        else:
            self._print_rows(list(self._rows(commit)))

    def _print_rows(self, rows: Sequence[Sequence[str]]) -> None:
        if self._format is Format.TABLE:
            self._table.print(rows)
        else:
            for row in rows:
                print_line("\t".join(row))

    def _rows(self, commit: WatchCommit) -> Iterator[Sequence[str]]:
        spell = self._encoding.encode
        for change in commit.changes:
            is_range = change.kind is ChangeKind.DELETE_RANGE
            second = spell(change.end if is_range else change.value)
            before = spell(change.previous.value) if change.previous else ""
            before = UNKNOWN if change.previous_unknown else before
            yield self._row(commit.seq, _kind(change), spell(change.key), second, before)

    def _row(self, seq: int, kind: str, key: str, value: str, before: str) -> Sequence[str]:
        row = (str(seq), kind, key, value)
        return (*row, before) if self._has_previous else row

    def _record(self, change: WatchChange) -> dict[str, Any]:
        encoding = self._encoding
        record: dict[str, Any] = {
            "kind": _kind(change),
            **json_field("key", change.key, encoding),
        }
        if change.kind is ChangeKind.DELETE_RANGE:
            record |= json_field("end", change.end, encoding)
        if change.kind is ChangeKind.PUT:
            record |= json_field("value", change.value, encoding)
        if change.kind in {ChangeKind.PUT, ChangeKind.EXPIRED}:
            record["expire_at_ms"] = change.expire_at_ms
        if self._has_previous and change.kind is not ChangeKind.DELETE_RANGE:
            record |= self._before(change)
        return record

    def _before(self, change: WatchChange) -> dict[str, Any]:
        if change.previous_unknown:
            return {"previous_unknown": True}
        before = change.previous
        if before is None:
            return {PREVIOUS: None}
        value = json_field("value", before.value, self._encoding)
        told = {**value, "seq": before.seq, "expire_at_ms": before.expire_at_ms}
        return {PREVIOUS: told}


def _kind(change: WatchChange) -> str:
    return change.kind.name.lower() if change.kind is not None else "unknown"
