"""Inputs of a load that are in memory, and the batches that are read from them."""

from __future__ import annotations

import io
from collections.abc import Iterable

from shalekv.cli.keys import Encoding
from shalekv.cli.pairs.batches import BatchLimits, Rows
from shalekv.cli.pairs.columns import Columns
from shalekv.cli.pairs.file_format import FileFormat
from shalekv.cli.pairs.lines import BadRow, Position
from shalekv.cli.pairs.reading import Reading, read_batches
from shalekv.cli.pairs.source import Source
from shalekv_client import Put

NOW_MS = 1_000_000


def batches(
    data: bytes,
    reading: Reading | None = None,
    *,
    count_max: int = 1_000,
    bytes_max: int = 1_000_000,
    begin: Position | None = None,
    bad_rows_end_it: bool = True,
) -> Iterable[Rows]:
    return read_batches(
        Source(io.BytesIO(data)),
        reading or Reading(),
        BatchLimits(count_max, bytes_max),
        now_ms=lambda: NOW_MS,
        begin=begin,
        bad_rows_end_it=bad_rows_end_it,
    )


def rows_of(data: bytes, reading: Reading) -> tuple[list[Put], list[BadRow]]:
    found = list(batches(data, reading, bad_rows_end_it=False))
    return [put for rows in found for put in rows.puts], [bad for r in found for bad in r.bad]


def reading(
    file_format: FileFormat,
    key: str | None = None,
    value: str | None = None,
    *,
    header: bool | None = None,
    encoding: Encoding = Encoding.TEXT,
) -> Reading:
    return Reading(file_format, Columns(key, value, header, encoding))
