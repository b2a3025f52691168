"""What clients did and what they were told, for the checkers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Outcome(enum.Enum):
    """What a client knows of its write in the end."""

    ACKNOWLEDGED = "acknowledged"
    IN_MEMORY = "acknowledged from memory"
    NOT_APPLIED = "told that it was not applied"
    UNKNOWN = "not told"


@dataclass(slots=True)
class WriteOp:
    """One put, delete or batch. Every value that it writes is its own number."""

    number: int
    keys: tuple[bytes, ...]
    is_delete: bool
    invoked_us: int
    outcome: Outcome = Outcome.UNKNOWN
    replied_us: int | None = None
    seq: int = 0
    wal_id: int | None = None

    @property
    def value(self) -> bytes:
        """What it writes to each key; deletes are recognised by their sequence number."""
        return b"" if self.is_delete else str(self.number).encode()


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One get that was answered."""

    key: bytes
    is_linearizable: bool
    invoked_us: int
    found: bool
    value: bytes
    seq: int  # of the value; 0: there was none
    header_seq: int


@dataclass(frozen=True, slots=True)
class ScanOp:
    """One scan of everything that was answered to its end."""

    invoked_us: int
    header_seq: int
    entries: tuple[tuple[bytes, int], ...]  # key and sequence number


@dataclass(slots=True)
class History:
    """All that happened, in the order of invocation."""

    writes: list[WriteOp] = field(default_factory=list)
    reads: list[ReadOp] = field(default_factory=list)
    scans: list[ScanOp] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)  # why writers ended

    def acknowledged(self) -> list[WriteOp]:
        """The writes that were acknowledged as durable."""
        return [op for op in self.writes if op.outcome is Outcome.ACKNOWLEDGED]
