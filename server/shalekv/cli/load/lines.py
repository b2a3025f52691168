"""The lines of an input, and what readers make of them: pairs, or bad rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeAlias

from shalekv_client import Put

KEY_BYTES_MAX = 64 * 1024  # the limit of the API; that of values is a setting of the server
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs begin a text with it; it is no part of it
LINE_BYTES_MAX = 256 * 1024 * 1024  # a line in hexadecimal is twice as long as its bytes


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two rows of an input, after its decompression."""

    line: int = 0  # so many lines are before it
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not a pair."""

    line: int  # counts from 1; of a row of several lines the first
    problem: str
    row: bytes  # as it stands in the input, without the end of the line

    def __str__(self) -> str:
        """Where, and what."""
        return f"line {self.line:,}: {self.problem}"


class BadInput(Exception):
    """The input is wrong, or cannot be read, at some line. All rows before it are good."""

    def __init__(self, line: int, problem: str) -> None:
        """`line` counts from 1."""
        super().__init__(f"line {line:,}: {problem}")


# None: lines without a row, such as an empty one.
Row: TypeAlias = Put | BadRow | None


class RowReader(Protocol):
    """Reads rows in one format."""

    @property
    def lines(self) -> Lines:
        """What it reads from; after a row the position is the end of the row."""
        ...

    def begin(self) -> None:
        """Read what comes before the first row; before anything else."""
        ...

    def rows(self) -> Iterator[Row]:
        """The rows from the position of the lines on. Raises `BadInput`."""
        ...


class Lines:
    """The lines of a stream, each with its end, and the position after the last one read."""

    def __init__(self, stream: BinaryIO) -> None:
        """`stream` stands at its beginning."""
        self.number = 0
        self.offset_bytes = 0
        self._stream = stream

    @property
    def position(self) -> Position:
        """The end of the last line that was read."""
        return Position(self.number, self.offset_bytes)

    def skip_to(self, position: Position) -> None:
        """Go on there; raises `BadInput` when the stream ends before it."""
        try:
            reached_bytes = self._stream.seek(position.offset_bytes)
        except (OSError, EOFError, zlib.error) as error:
            raise _bad_input(position.line + 1, error) from error
        if reached_bytes != position.offset_bytes:
            raise BadInput(position.line + 1, "the input ends before it")
        self.number, self.offset_bytes = position.line, position.offset_bytes

    def __iter__(self) -> Iterator[bytes]:
        """The lines from here on. Raises `BadInput`."""
        readline = self._stream.readline
        try:
            while line := readline(LINE_BYTES_MAX):
                self.number += 1
                self.offset_bytes += len(line)
                if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
                    raise BadInput(self.number, f"it is longer than {LINE_BYTES_MAX:,} bytes")
                yield line
        except (OSError, EOFError, zlib.error) as error:
            raise _bad_input(self.number + 1, error) from error


def _bad_input(line: int, error: Exception) -> BadInput:
    return BadInput(line, f"the input cannot be read: {error}")


def without_end(line: bytes) -> bytes:
    """A line without the LF, or CR LF, at its end."""
    return line.removesuffix(b"\n").removesuffix(b"\r")


def key_problem(key: bytes) -> str | None:
    """Why `key` cannot be a key, if it cannot."""
    if 0 < len(key) <= KEY_BYTES_MAX:
        return None
    return f"a key has 1 to {KEY_BYTES_MAX} bytes, this one has {len(key)}"
