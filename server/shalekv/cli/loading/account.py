"""What a load has done so far, and up to where that is certain."""

from __future__ import annotations

from dataclasses import dataclass, field

from shalekv.cli.load.batches import Rows
from shalekv.cli.load.lines import BadInput, BadRow, Position
from shalekv_client import ShaleKVError


@dataclass(frozen=True, slots=True)
class _Done:
    """A batch that is stored; its pairs are not kept."""

    end: Position
    rows: int
    bad: tuple[BadRow, ...]


@dataclass(slots=True)
class Account:
    """What a load has done so far."""

    position: Position = field(default_factory=Position)  # all rows before it are stored, or bad
    rows: int = 0  # acknowledged
    bytes: int = 0  # of acknowledged keys and values
    source_bytes: int = 0  # of the lines of acknowledged rows
    refused: list[tuple[Rows, ShaleKVError]] = field(default_factory=list)  # not applied
    unknown: list[tuple[Rows, ShaleKVError]] = field(default_factory=list)  # perhaps applied
    cancelled_rows: int = 0  # given up while they were under way
    bad_input: BadInput | None = None
    file_trouble: OSError | None = None  # with a file that the load writes
    certain_rows: int = 0  # before `position`, of this run
    certain_bad: list[BadRow] = field(default_factory=list)  # before it, and not yet taken
    _next: int = 0
    _beyond: dict[int, _Done] = field(default_factory=dict)

    @property
    def rows_beyond(self) -> int:
        """Rows after `position` that are stored as well."""
        return sum(done.rows for done in self._beyond.values())

    @property
    def batches_beyond(self) -> int:
        """Batches after `position` that are stored, and kept in mind until those before are."""
        return len(self._beyond)

    @property
    def unknown_rows(self) -> int:
        """Rows that may be stored or not."""
        return self.cancelled_rows + sum(len(rows.puts) for rows, _ in self.unknown)

    @property
    def is_good(self) -> bool:
        """Whether nothing has failed."""
        return not (self.refused or self.unknown or self.bad_input or self.file_trouble)

    def failures(self) -> list[tuple[Rows, ShaleKVError]]:
        """What was not acknowledged, by line."""
        return sorted(self.refused + self.unknown, key=lambda failure: failure[0].first_line)

    def acknowledge(self, rows: Rows) -> None:
        """These rows are stored."""
        self.rows += len(rows.puts)
        self.bytes += rows.size_bytes
        self.source_bytes += rows.source_bytes
        self._beyond[rows.number] = _Done(rows.end, len(rows.puts), tuple(rows.bad))
        while done := self._beyond.pop(self._next, None):
            self._next += 1
            self.position = done.end
            self.certain_rows += done.rows
            self.certain_bad += done.bad

    def take_bad(self) -> list[BadRow]:
        """The bad rows before `position` that were not taken before."""
        taken, self.certain_bad = self.certain_bad, []
        return taken
