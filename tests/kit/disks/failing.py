"""A real file system in which a test makes chosen calls fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shalekv.store.files import FileSystem

PIECE_BYTES = 1_000  # the most that one call reads or writes
_NOTED = (
    "create open open_folder open_update allocate sync_data fsync link unlink mkdir rename append "
    "touch touch_open try_lock list_files"
).split()


class FailingFileSystem(FileSystem):
    """Raises `OSError` from the calls that were passed to `fail`; all others work."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._failures: dict[str, tuple[int, int]] = {}  # call: errno, and after how many

    def fail(self, call: str, error: int, *, after: int = 0) -> None:
        """Make this call fail from now on, after `after` successful ones."""
        self._failures[call] = (error, after)

    def clear_failures(self) -> None:
        self._failures.clear()

    def write(self, descriptor: int, data: memoryview) -> int:
        self.note("write")
        return super().write(descriptor, data[:PIECE_BYTES])

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.note("pwrite")
        return super().pwrite(descriptor, data[:PIECE_BYTES], offset)

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        self.note("pread")
        return super().pread(descriptor, min(length, PIECE_BYTES), offset)

    def pread_now(self, descriptor: int, length: int, offset: int) -> bytes | None:
        del descriptor, length, offset
        return None  # nothing is in the page cache

    def may_write(self, folder: Path) -> bool:
        return "may_write" not in self._failures and super().may_write(folder)

    def note(self, call: str) -> None:
        """Record a call; raise if it is to fail."""
        self.calls.append(call)
        error, after = self._failures.get(call, (0, 0))
        if error and after:
            self._failures[call] = (error, after - 1)
        elif error:
            raise OSError(error, os.strerror(error))


def _noted(name: str) -> Callable[..., Any]:
    real = getattr(FileSystem, name)

    def call(self: FailingFileSystem, *arguments: Any) -> Any:
        self.note(name)
        return real(self, *arguments)

    return call


for _name in _NOTED:
    setattr(FailingFileSystem, _name, _noted(_name))
