"""The file of `--bad-rows`: a JSON object for each row that is not a pair.

    {"line":6,"problem":"a row is a key, a TAB and a value; this has no TAB: 'x'","row":"x"}

A row that is not UTF-8 is ``row_base64``. Of a row that the server has refused, `row` is its key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from shalekv.cli.console.keys import Encoding, json_field
from shalekv.cli.load.lines import BadRow
from shalekv.cli.pairs.ndjson import compact_json


class BadRowFile:
    """Appends rows, in the order of their lines."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        """Keep the first `size_bytes` of the file, and go on there; raises OSError."""
        self.path = path
        self._file = path.open("r+b" if size_bytes else "wb")
        found = self._file.seek(0, os.SEEK_END)
        if found < size_bytes:
            self._file.close()
            raise OSError(f"{path} has {found:,} bytes, and it had {size_bytes:,} before")
        self._file.truncate(size_bytes)
        self._file.seek(size_bytes)
        self.size_bytes = size_bytes
        self.count = 0  # that were added

    def add(self, rows: Iterable[BadRow]) -> None:
        """Append; `sync` makes it durable."""
        for row in rows:
            members = {"line": row.line, "problem": row.problem}
            text = compact_json(members | json_field("row", row.row, Encoding.TEXT)) + "\n"
            self.size_bytes += self._file.write(text.encode("utf-8", "backslashreplace"))
            self.count += 1

    def sync(self) -> None:
        """What was added is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what was added."""
        self._file.close()
