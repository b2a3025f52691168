"""From a source to batches: opens it, finds its format, skips what was done, reads and cuts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shalekv.cli.load.batches import BatchLimits, Rows, cut
from shalekv.cli.load.formats import DelimitedRows
from shalekv.cli.load.lines import BadInput, Lines, Position, RowReader
from shalekv.cli.load.source import Source, put_back
from shalekv.cli.pairs.columns import Columns
from shalekv.cli.pairs.file_format import FileFormat, format_of_beginning
from shalekv.cli.pairs.ndjson import NdjsonRows

LOOKED_AT_BYTES = 64 * 1024  # of the first line, to tell the format


@dataclass(frozen=True, slots=True)
class Reading:
    """How an input is to be read."""

    file_format: FileFormat | None = None  # None: as it looks
    columns: Columns = field(default_factory=Columns)
    ttl_ms: int = 0  # of every pair; 0: never, or what its row says


def read_batches(
    source: Source,
    reading: Reading,
    limits: BatchLimits,
    *,
    now_ms: Callable[[], int],
    begin: Position | None = None,
    bad_rows_end_it: bool = True,
) -> Iterator[Rows]:
    """The batches of `source` from `begin` on; nothing is read before the first is asked for.

    Raises `BadInput`, after all batches before it.
    """
    place = begin or Position()
    try:
        reader = _open(source, reading, now_ms)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(1, f"the input cannot be read: {error}") from error
    reader.begin()
    if place != Position():
        reader.lines.skip_to(place)
    yield from cut(reader, limits, begin=place, bad_rows_end_it=bad_rows_end_it)


def _open(source: Source, reading: Reading, now_ms: Callable[[], int]) -> RowReader:
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
