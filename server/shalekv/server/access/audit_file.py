"""The file of the audit log.

Lines are collected during a turn of the event loop and written by one system call to a descriptor
that appends; processes may share a file. When a write fails, its lines are lost: the process goes
on, counts them, and logs that once a minute.
"""

from __future__ import annotations

import asyncio
import os
import stat

import structlog

from shalekv.clock import Clock
from shalekv.errors import InvalidSetting

STDERR = "stderr"
LOST_LOG_INTERVAL_MS = 60_000
FILE_MODE = 0o600

_STANDARD_ERROR = 2

_log = structlog.get_logger(__name__)


class AuditFile:
    """A file to which whole lines are appended, also by other processes."""

    def __init__(self, path: str, clock: Clock) -> None:
        """Open it, or standard error if `path` says so. Raises `InvalidSetting`."""
        self.lost_count = 0  # lines that could not be written
        self._path = path
        self._clock = clock
        self._lines: list[bytes] = []
        self._is_torn = False  # the file ends within a line
        self._logged_ms = -float(LOST_LOG_INTERVAL_MS)
        try:
            self._file = _opened(path)
        except OSError as error:
            raise InvalidSetting(f"--audit-log {path}: {error.strerror}") from error

    def append(self, line: bytes, *, is_urgent: bool = False) -> None:
        """Write a line before the loop waits again; at once if it is urgent."""
        self._lines.append(line)
        if is_urgent:
            self.flush()
        elif len(self._lines) == 1:
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write what was collected."""
        lines, self._lines = self._lines, []
        if len(lines) > 1 and stat.S_ISREG(os.fstat(self._file).st_mode):
            lines = [b"".join(lines)]
        for data in lines:  # a pipe takes no more than a line without mixing it with others
            self._write(data)

    def reopen(self) -> None:
        """Go on in the file that has the path now: the former one was renamed, or removed.

        If it cannot be opened, the former one stays in use, and the problem is logged.
        """
        self.flush()
        if self._path == STDERR:
            return
        try:
            file = _opened(self._path)
        except OSError as error:
            problem = error.strerror
            _log.error("audit log cannot be opened again", path=self._path, problem=problem)
            return
        os.close(self._file)
        self._file, self._is_torn = file, False
        _log.info("audit log opened again", path=self._path)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.flush()
        if self._path != STDERR:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        """Write lines; what follows a line that was written in part begins a new one."""
        was_torn, written = self._is_torn, 0
        if was_torn:
            data = b"\n" + data
        try:
            while written < len(data):
                written += os.write(self._file, data[written:] if written else data)
                self._is_torn = not data.endswith(b"\n", 0, written)
        except OSError as error:
            self._lose(data.count(b"\n", written) - (was_torn and not written), error)

    def _lose(self, count: int, error: OSError) -> None:
        self.lost_count += count
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._logged_ms >= LOST_LOG_INTERVAL_MS:
            self._logged_ms = now_ms
            problem = error.strerror
            _log.error("lines of the audit log are lost", lost=self.lost_count, problem=problem)


def _opened(path: str) -> int:
    if path == STDERR:
        return _STANDARD_ERROR
    # A pipe that nobody reads must not block the process: its lines are lost.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    return os.open(path, flags, FILE_MODE)
