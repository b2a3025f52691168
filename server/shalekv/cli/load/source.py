"""The bytes of a file or pipe: decompressed where it is gzip, read again from its beginning where
that can be done, and told from outside to end.

A thread that waits for standard input cannot be cancelled; without this Ctrl-C would wait for the
next line.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import select
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from typing_extensions import Buffer

from shalekv.cli.load.batches import BatchLimits, RowBatch, cut
from shalekv.cli.load.formats import DelimitedRows, FileFormat, NdjsonRows, format_of_beginning
from shalekv.cli.load.lines import BadInput, ColumnChoice, InputPosition, Lines, RowReader

BUFFER_BYTES = 128 * 1024
BEGINNING_BYTES = 64 * 1024  # what tells one input from another of the same size
# RFC 1952, 2.3: the magic number and deflate, the only method; then flags. Three of these are
# reserved; nobody sets FTEXT, and a tab, which ends the key of a TSV, has its bit.
GZIP_MAGIC = b"\x1f\x8b\x08"
GZIP_FLAGS_NEVER_SET = 0xE0 | 0x01
GZIP_HEAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """By what an input is known again."""

    size_bytes: int
    beginning_sha256: str


class InputSource:
    """The bytes of `file`, until its end or until `close`."""

    def __init__(self, file: BinaryIO) -> None:
        """`file` was not read from yet. What has no descriptor is read as it is."""
        self._file = file
        self._raw: _Stoppable | None = None
        self._buffered: BinaryIO | None = None
        self._is_file = False
        self.size_bytes: int | None = None  # that are to come; None: nobody knows
        try:
            descriptor = file.fileno()
        except io.UnsupportedOperation:
            return
        found = os.fstat(descriptor)
        self._is_file = stat.S_ISREG(found.st_mode) and os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        if self._is_file:
            self.size_bytes = found.st_size
        self._raw = _Stoppable(descriptor, is_seekable=self._is_file)

    def identity(self) -> Identity | None:
        """What tells this file from others; None: it is a pipe, and cannot be read again."""
        if not self._is_file or self.size_bytes is None:
            return None
        beginning = os.pread(self._file.fileno(), BEGINNING_BYTES, 0)
        return Identity(self.size_bytes, hashlib.sha256(beginning).hexdigest())

    def open(self) -> BinaryIO:
        """The decompressed bytes. Waits for the first of them, so call it where that is no harm."""
        plain = self._file
        if self._raw is not None:
            # Kept, since one that is forgotten closes what it reads from.
            plain = self._buffered = cast("BinaryIO", io.BufferedReader(self._raw, BUFFER_BYTES))
        head = plain.read(GZIP_HEAD_BYTES)
        stream = put_back(head, plain)
        if not is_gzip(head):
            return stream
        self.size_bytes = None  # of what is inside
        unzipped = gzip.GzipFile(fileobj=stream, mode="rb")
        return cast("BinaryIO", io.BufferedReader(unzipped, BUFFER_BYTES))

    def close(self) -> None:
        """Whoever reads, now or later, finds the end."""
        if self._raw is not None:
            self._raw.stop()


def is_gzip(head: bytes) -> bool:
    """True if the first 4 bytes of a file begin a gzip member. Text may begin with 3 of them."""
    is_begun = len(head) == GZIP_HEAD_BYTES and head.startswith(GZIP_MAGIC)
    return is_begun and not head[-1] & GZIP_FLAGS_NEVER_SET


def put_back(head: bytes, stream: BinaryIO) -> BinaryIO:
    """A stream that gives `head`, which was read from the beginning of `stream`, once more."""
    if stream.seekable():
        stream.seek(0)
        return stream
    return cast("BinaryIO", io.BufferedReader(_Joined(head, stream), BUFFER_BYTES))


class _Joined(io.RawIOBase):
    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = cast("io.BufferedReader", stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        if not self._head:
            return self._stream.readinto1(view)
        taken = self._head[: len(view)]
        view[: len(taken)] = taken
        self._head = self._head[len(taken) :]
        return len(taken)


class _Stoppable(io.RawIOBase):
    def __init__(self, descriptor: int, *, is_seekable: bool) -> None:
        self._descriptor = descriptor
        self._is_seekable = is_seekable
        self._stopped, self._stopper = os.pipe()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._is_seekable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._descriptor, offset, whence)

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


# --- reading
# From a source to batches: opens it, finds its format, skips what was done, reads and cuts.


LOOKED_AT_BYTES = 64 * 1024  # of the first line, to tell the format


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How an input is to be read."""

    file_format: FileFormat | None = None  # None: as it looks
    columns: ColumnChoice = field(default_factory=ColumnChoice)
    ttl_ms: int = 0  # of every pair; 0: never, or what its row says


def read_batches(
    source: InputSource,
    reading: InputOptions,
    limits: BatchLimits,
    *,
    now_ms: Callable[[], int],
    begin: InputPosition | None = None,
    bad_rows_end_it: bool = True,
) -> Iterator[RowBatch]:
    """The batches of `source` from `begin` on; nothing is read before the first is asked for.

    Raises `BadInput`, after all batches before it.
    """
    place = begin or InputPosition()
    try:
        reader = _open(source, reading, now_ms)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(1, f"the input cannot be read: {error}") from error
    reader.begin()
    if place != InputPosition():
        reader.lines.skip_to(place)
    yield from cut(reader, limits, begin=place, bad_rows_end_it=bad_rows_end_it)


def _open(source: InputSource, reading: InputOptions, now_ms: Callable[[], int]) -> RowReader:
    stream = source.open()
    file_format = reading.file_format
    if file_format is None:
        line = stream.readline(LOOKED_AT_BYTES)
        stream = put_back(line, stream)
        file_format = format_of_beginning(line)
    lines = Lines(stream)
    if file_format is FileFormat.NDJSON:
        return NdjsonRows(lines, reading.columns, ttl_ms=reading.ttl_ms, now_ms=now_ms)
    return DelimitedRows(lines, file_format, reading.columns, ttl_ms=reading.ttl_ms)
