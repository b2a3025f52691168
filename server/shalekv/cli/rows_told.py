"""How far a command has come that writes rows into a file."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class RowsTold:
    """Rows that were written, and the bytes of their keys and values."""

    rows: int = 0
    bytes: int = 0


@contextmanager
def telling(told: RowsTold, *, to_file: bool) -> Iterator[None]:
    """A bar on stderr, if that is a terminal, and the rows go `to_file` or into a redirection."""
    if sys.stderr.isatty() and (to_file or _is_redirected()):
        from shalekv.cli.console.progress import rows_bar  # noqa: PLC0415 (others don't wait for it)

        with rows_bar(told):
            yield
    else:
        yield


def _is_redirected() -> bool:
    """Whether standard output is a file: of a pipe nobody knows what is behind it."""
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # it is none of the operating system's
        return False
