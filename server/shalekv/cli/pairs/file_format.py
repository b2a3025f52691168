"""In which format a file of pairs is: as the user says, as its name says, or as it looks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, TypeVar

import click

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

GZIP_SUFFIX = ".gz"


class FileFormat(enum.Enum):
    """How rows stand in a file."""

    TSV = "tsv"
    CSV = "csv"
    NDJSON = "ndjson"


_BY_SUFFIX = {
    ".tsv": FileFormat.TSV,
    ".csv": FileFormat.CSV,
    ".ndjson": FileFormat.NDJSON,
    ".jsonl": FileFormat.NDJSON,
}


def file_format_option(flag: str, text: str) -> Callable[[CommandT], CommandT]:
    """A decorator that adds `flag`, as the argument `file_format`; None when it is not given."""
    return click.option(
        flag,
        "file_format",
        type=click.Choice([f.value for f in FileFormat]),
        callback=lambda _context, _option, value: FileFormat(value) if value else None,
        help=text,
    )


def format_of_name(name: str) -> FileFormat | None:
    """What the name of a file says, with or without ``.gz`` at its end."""
    path = PurePath(name.lower())
    return _BY_SUFFIX.get(PurePath(path.stem).suffix if is_gzip_name(name) else path.suffix)


def is_gzip_name(name: str) -> bool:
    """Whether a file of this name is compressed."""
    return name.lower().endswith(GZIP_SUFFIX)


def format_of_beginning(line: bytes) -> FileFormat:
    """What the first line of a nameless input tells.

    One that begins with { and has no TAB can be no row of TSV; so nothing that is TSV is taken
    for something else.
    """
    is_object = line.lstrip().startswith(b"{") and b"\t" not in line
    return FileFormat.NDJSON if is_object else FileFormat.TSV
