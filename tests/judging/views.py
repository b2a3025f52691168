"""What scans were told of views of the database, and the judgement over it.

A view is one state at one moment. However often, from where and in what portions it is read, the
answer is the same to the byte until the database says that it is gone (I7); and it is that of the
model (I2, I9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shalekv.core.key_range import KeyRange
from tests.judging.commits import Between, Commits, Told, Violation

ALL_KEYS = KeyRange(b"", b"")


class Row(NamedTuple):
    """An entry of a scan, to the byte."""

    key: bytes
    value: bytes
    seq: int
    expire_at_ms: int | None


@dataclass(slots=True)
class SeenView:
    """A view that is open, and what it was first told to hold."""

    seq: int
    now: Between
    rows: Sequence[Row]  # in the order of the scan
    keys: KeyRange = ALL_KEYS
    reads: int = 1

    def read_again(self, rows: Sequence[Row], *, first: int = 0) -> None:
        """It was read once more, from its row number `first` on. Raises `Violation` (I7)."""
        self.reads += 1
        before = self.rows[first:]
        if list(rows) == list(before):
            return
        if len(rows) < len(before) and list(rows) == list(before[: len(rows)]):
            problem = f"ends after {len(rows)} of {len(before)} rows"
        else:
            pairs = zip(rows, before, strict=False)
            other = next((pair for pair in pairs if pair[0] != pair[1]), (len(rows), len(before)))
            problem = f"differs: {other[0]}, and before {other[1]}"
        raise Violation(f"view {self.seq}, read {self.reads}: {problem}")


@dataclass(slots=True)
class SeenViews:
    """All that was read of a database."""

    commits: Commits
    views: list[SeenView] = field(default_factory=list)

    def check(self) -> None:
        """Judge all views by the model. REQUIRES: every commit that they can hold was added.

        Raises `Violation`.
        """
        ordered = sorted(self.views, key=lambda view: view.seq)
        states = self.commits.states(view.seq for view in ordered)
        for view, state in zip(ordered, states, strict=True):
            keys = [row.key for row in view.rows]
            if sorted({*keys}) != sorted(keys):
                raise Violation(f"view {view.seq}: a key stands there twice")
            if keys not in (sorted(keys), sorted(keys, reverse=True)):
                raise Violation(f"view {view.seq}: its keys are not in order")
            told = {row.key: Told(row.value, row.seq) for row in view.rows}
            state.check_range(view.keys, view.now, told)
