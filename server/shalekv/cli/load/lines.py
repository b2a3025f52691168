"""Lines, rows and columns of an input, common to all formats."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeAlias

from shalekv.cli.console.keys import Encoding
from shalekv_client import Put

KEY_BYTES_MAX = 64 * 1024  # the limit of the API; that of values is a setting of the server
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs write it before a text; it is dropped
KEY = "key"
VALUE = "value"
LINE_BYTES_MAX = 256 * 1024 * 1024  # a line in hexadecimal is twice as long as its bytes


@dataclass(frozen=True, slots=True)
class InputPosition:
    """A position between two rows of the decompressed input."""

    line: int = 0  # number of lines before it
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not a pair."""

    line: int  # from 1; the first line of a row of several
    problem: str
    row: bytes  # the bytes of the input, without the end of the line

    def __str__(self) -> str:
        """The line and the problem."""
        return f"line {self.line:,}: {self.problem}"


class BadInput(Exception):
    """The input is invalid or unreadable at some line. All rows before it are valid."""

    def __init__(self, line: int, problem: str) -> None:
        """`line` counts from 1."""
        super().__init__(f"line {line:,}: {problem}")


Row: TypeAlias = Put | BadRow | None
"""A pair, a bad row, or None for lines without a row, such as an empty line."""


class RowReader(Protocol):
    """Reads rows in one format."""

    @property
    def lines(self) -> Lines:
        """The lines that are read; after a row, their position is the end of the row."""
        ...

    def begin(self) -> None:
        """Read the header, if any. REQUIRES: nothing has been read before."""
        ...

    def rows(self) -> Iterator[Row]:
        """Yield the rows from the position of the lines on. Raises `BadInput`."""
        ...


class Lines:
    """The lines of a stream, each with its end, and the position after the last one read."""

    def __init__(self, stream: BinaryIO) -> None:
        """REQUIRES: `stream` is at its beginning."""
        self.number = 0
        self.offset_bytes = 0
        self._stream = stream

    @property
    def position(self) -> InputPosition:
        """The end of the last line that was read."""
        return InputPosition(self.number, self.offset_bytes)

    def skip_to(self, position: InputPosition) -> None:
        """Continue at `position`. Raises `BadInput` when the stream ends before it."""
        try:
            reached_bytes = self._stream.seek(position.offset_bytes)
        except (OSError, EOFError, zlib.error) as error:
            raise _bad_input(position.line + 1, error) from error
        if reached_bytes != position.offset_bytes:
            raise BadInput(position.line + 1, "the input ends before it")
        self.number, self.offset_bytes = position.line, position.offset_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines from the position on. Raises `BadInput`."""
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
    """Remove the LF or CR LF at the end of a line."""
    return line.removesuffix(b"\n").removesuffix(b"\r")


def key_problem(key: bytes) -> str | None:
    """The reason why `key` is not a valid key; None if it is."""
    if 0 < len(key) <= KEY_BYTES_MAX:
        return None
    return f"a key has 1 to {KEY_BYTES_MAX} bytes, this one has {len(key)}"


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns, or members, of key and value as chosen by the user, and their encoding."""

    key: str | None = None  # a name, or a number from 1; None: not chosen
    value: str | None = None
    header: bool | None = None  # whether the first row names the columns
    encoding: Encoding = Encoding.TEXT  # unless the name of a column implies another

    @property
    def are_named(self) -> bool:
        """Return whether a column is chosen by name."""
        given = [word for word in (self.key, self.value) if word is not None]
        return any(number_of(word) is None for word in given)

    @property
    def are_given(self) -> bool:
        """Return whether a column is chosen."""
        return self.key is not None or self.value is not None


def number_of(word: str) -> int | None:
    """Parse the number of a column, from 1; None if `word` is not a number."""
    return int(word) if word.isascii() and word.isdecimal() and int(word) else None


def spellings(name: str, encoding: Encoding) -> list[tuple[str, Encoding]]:
    """The possible names of a column, each with the encoding of its cells.

    ``NAME`` is in `encoding`; ``NAME_hex``, ``NAME_base64`` and ``NAME_escaped`` are in those of
    their suffixes, as written by `json_field`.
    """
    suffixes = [e for e in Encoding if e is not Encoding.TEXT]
    return [(name, encoding), *((f"{name}_{e.value}", e) for e in suffixes)]


def find_column(word: str, names: Sequence[str], encoding: Encoding) -> tuple[int, Encoding]:
    """Find the index of a column in a header with `names`, and the encoding of its cells.

    Raises ValueError with the names of the header.
    """
    number = number_of(word)
    if number is not None:
        return number - 1, encoding
    for name, spelled in spellings(word, encoding):
        if name in names:
            return names.index(name), spelled
    raise ValueError(f"there is no column '{word}'; the header has: {', '.join(names)}")
