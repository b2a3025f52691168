"""A file or pipe that is read in a thread, and can be told from outside to end.

A thread that waits for standard input cannot be cancelled; without this Ctrl-C would wait for the
next line.
"""

from __future__ import annotations

import io
import os
import select
import stat
from types import TracebackType
from typing import BinaryIO, Self, cast

from typing_extensions import Buffer

BUFFER_BYTES = 128 * 1024


class Source:
    """The bytes of `file`, until its end or until `stop`."""

    def __init__(self, file: BinaryIO) -> None:
        """`file` was not read from yet. What has no descriptor is read as it is."""
        self._raw: _Stoppable | None = None
        self.size_bytes: int | None = None  # that are to come; None: nobody knows
        self.stream: BinaryIO = file
        try:
            descriptor = file.fileno()
        except io.UnsupportedOperation:
            return
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            self.size_bytes = found.st_size - file.tell()
        self._raw = _Stoppable(descriptor)
        self.stream = cast("BinaryIO", io.BufferedReader(self._raw, BUFFER_BYTES))

    def stop(self) -> None:
        """Whoever reads, now or later, finds the end."""
        if self._raw is not None:
            self._raw.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class _Stoppable(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._stopped, self._stopper = os.pipe()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        ready, _, _ = select.select([self._descriptor, self._stopped], [], [])
        return 0 if self._stopped in ready else os.readv(self._descriptor, [buffer])

    def stop(self) -> None:
        os.write(self._stopper, b".")  # and never read: it stays stopped

    def close(self) -> None:
        if not self.closed:
            os.close(self._stopped)
            os.close(self._stopper)
        super().close()
