"""Rows for a file of pairs, as the readers of this package read them back, byte by byte."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shalekv.cli.console.keys import Encoding, shown
from shalekv.cli.pairs.columns import KEY, VALUE
from shalekv.cli.pairs.file_format import FileFormat
from shalekv.cli.pairs.ndjson import row_of
from shalekv_client import Entry

RowWriter: TypeAlias = Callable[[Sequence[Entry]], bytes]

# What a cell of TSV cannot have; a carriage return only at the end of a line.
_TSV_SEPARATORS = (b"\t", b"\n")


class NotWritable(Exception):
    """A pair cannot stand in the file, in this format and encoding."""


def header(file_format: FileFormat) -> bytes:
    """What comes before the rows."""
    return f"{KEY},{VALUE}\r\n".encode() if file_format is FileFormat.CSV else b""


def row_writer(file_format: FileFormat, encoding: Encoding) -> RowWriter:
    """What makes rows of entries. It raises `NotWritable`."""
    match file_format, encoding:
        case FileFormat.NDJSON, _:
            return lambda entries: _lines([row_of(e, encoding) for e in entries]).encode()
        case FileFormat.CSV, _:
            return lambda entries: _csv(entries, encoding)
        case FileFormat.TSV, Encoding.TEXT:
            return lambda entries: b"".join(map(_tsv_row, entries))
        case _:
            spell = encoding.encode
            return lambda entries: _lines(
                [f"{spell(e.key)}\t{spell(e.value)}" for e in entries]
            ).encode()


def keeps_expiry(file_format: FileFormat) -> bool:
    """Whether rows of this format say when they expire."""
    return file_format is FileFormat.NDJSON


def _lines(rows: Sequence[str]) -> str:
    return "".join([f"{row}\n" for row in rows])


def _csv(entries: Sequence[Entry], encoding: Encoding) -> bytes:
    text = io.StringIO(newline="")
    spell = _raw_text if encoding is Encoding.TEXT else encoding.encode
    # CR LF ends a row, so that both of them are quoted inside of cells.
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerows([(spell(e.key), spell(e.value)) for e in entries])
    return text.getvalue().encode("utf-8", "surrogateescape")


def _raw_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _tsv_row(entry: Entry) -> bytes:
    for name, cell in ((KEY, entry.key), (VALUE, entry.value)):
        if any(separator in cell for separator in _TSV_SEPARATORS):
            raise _not_writable(entry, f"its {name} has a TAB or a line feed")
    if entry.value.endswith(b"\r"):
        raise _not_writable(entry, "its value ends in a carriage return")
    return b"%b\t%b\n" % (entry.key, entry.value)


def _not_writable(entry: Entry, problem: str) -> NotWritable:
    return NotWritable(
        f"TSV cannot have the pair of key '{shown(entry.key)}': {problem}. "
        "Choose --escaped, --hex or --base64, or another format"
    )
