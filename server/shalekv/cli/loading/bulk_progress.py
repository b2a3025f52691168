"""How far a bulk load has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BulkProgress:
    """Amounts so far; each is written by one place, and read by the bar."""

    source_bytes: int = 0  # that were read
    source_bytes_max: int | None = None  # that there are; None: nobody knows
    rows: int = 0  # that were read
    bytes: int = 0  # of their keys and values
    is_sorted: bool = False  # all was read
    keys: int = 0  # that are in files
    file_bytes: int = 0  # of files that are finished
