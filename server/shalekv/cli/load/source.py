"""Input of a load: the bytes of a file or pipe, decompressed if gzip, read into batches of rows.

A thread that waits for standard input cannot be cancelled, so a source can be closed from another
thread: without that, Ctrl-C would have to wait for the next line.
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

from shalekv.cli.load.batches import BatchLimits, RowBatch, batches_of
from shalekv.cli.load.formats import DelimitedRows, FileFormat, NdjsonRows, format_of_beginning
from shalekv.cli.load.lines import BadInput, ColumnChoice, InputPosition, Lines, RowReader

BUFFER_BYTES = 128 * 1024
BEGINNING_BYTES = 64 * 1024  # hashed to distinguish inputs of the same size
FIRST_LINE_BYTES = 64 * 1024  # of the first line, to recognize the format
# RFC 1952, 2.3: the magic number and deflate, the only method; then flags. Three of them are
# reserved. FTEXT is never set in practice, and its bit is set in a TAB, which ends the key in TSV.
GZIP_MAGIC = b"\x1f\x8b\x08"
GZIP_FLAGS_NEVER_SET = 0xE0 | 0x01
GZIP_HEAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of an input, to recognize it in a later run."""

    size_bytes: int
    beginning_sha256: str


class InputSource:
    """The bytes of `file`, until its end or until `close`."""

    def __init__(self, file: BinaryIO) -> None:
        """REQUIRES: nothing was read from `file`. Without a descriptor it cannot be interrupted."""
        self._file = file
        self._raw: _Stoppable | None = None
        self._buffered: BinaryIO | None = None
        self._is_file = False
        self.size_bytes: int | None = None  # to be read; None: unknown
        try:
            descriptor = file.fileno()
        except io.UnsupportedOperation:
            return
        found = os.fstat(descriptor)
        self._is_file = stat.S_ISREG(found.st_mode) and os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        if self._is_file:
            self.size_bytes = found.st_size
        self._raw = _Stoppable(descriptor, is_seekable=self._is_file)

    def identity(self) -> FileIdentity | None:
        """The identity of the file; None for a pipe, which cannot be read again."""
        if not self._is_file or self.size_bytes is None:
            return None
        beginning = os.pread(self._file.fileno(), BEGINNING_BYTES, 0)
        return FileIdentity(self.size_bytes, hashlib.sha256(beginning).hexdigest())

    def open(self) -> BinaryIO:
        """Open the decompressed bytes. Blocks until the first of them arrive."""
        plain = self._file
        if self._raw is not None:
            # Kept in an attribute: a reader that is garbage collected closes its raw stream.
            plain = self._buffered = cast("BinaryIO", io.BufferedReader(self._raw, BUFFER_BYTES))
        head = plain.read(GZIP_HEAD_BYTES)
        stream = put_back(head, plain)
        if not is_gzip(head):
            return stream
        self.size_bytes = None  # the decompressed size is unknown
        unzipped = gzip.GzipFile(fileobj=stream, mode="rb")
        return cast("BinaryIO", io.BufferedReader(unzipped, BUFFER_BYTES))

    def close(self) -> None:
        """End the input for current and later reads."""
        if self._raw is not None:
            self._raw.stop()


def is_gzip(head: bytes) -> bool:
    """Return whether the first 4 bytes of a file begin a gzip member; 3 of them could begin a
    text.
    """
    is_begun = len(head) == GZIP_HEAD_BYTES and head.startswith(GZIP_MAGIC)
    return is_begun and not head[-1] & GZIP_FLAGS_NEVER_SET


def put_back(head: bytes, stream: BinaryIO) -> BinaryIO:
    """Return a stream from the beginning of `stream`, from which `head` was already read."""
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
        os.write(self._stopper, b".")  # never read, so that it stays stopped

    def close(self) -> None:
        if not self.closed:
            os.close(self._stopped)
            os.close(self._stopper)
        super().close()


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options for reading an input."""

    file_format: FileFormat | None = None  # None: by its first line
    columns: ColumnChoice = field(default_factory=ColumnChoice)
    ttl_ms: int = 0  # of every pair; 0: none, or the expiry of its row


def read_batches(
    source: InputSource,
    reading: InputOptions,
    limits: BatchLimits,
    *,
    now_ms: Callable[[], int],
    begin: InputPosition | None = None,
    stop_at_bad_row: bool = True,
) -> Iterator[RowBatch]:
    """Read the batches of `source` from `begin` on. Nothing is read before the first `next`.

    Raises `BadInput`, after all batches before it.
    """
    position = begin or InputPosition()
    try:
        reader = _open(source, reading, now_ms)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(1, f"the input cannot be read: {error}") from error
    reader.begin()
    if position != InputPosition():
        reader.lines.skip_to(position)
    yield from batches_of(reader, limits, begin=position, stop_at_bad_row=stop_at_bad_row)


def _open(source: InputSource, reading: InputOptions, now_ms: Callable[[], int]) -> RowReader:
    stream = source.open()
    file_format = reading.file_format
    if file_format is None:
        line = stream.readline(FIRST_LINE_BYTES)
        stream = put_back(line, stream)
        file_format = format_of_beginning(line)
    lines = Lines(stream)
    if file_format is FileFormat.NDJSON:
        return NdjsonRows(lines, reading.columns, ttl_ms=reading.ttl_ms, now_ms=now_ms)
    return DelimitedRows(lines, file_format, reading.columns, ttl_ms=reading.ttl_ms)
