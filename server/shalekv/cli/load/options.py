"""The options of `shalekv load`, in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from shalekv.cli.console.keys import Encoding
from shalekv.cli.console.option_groups import gathered
from shalekv.cli.console.units import duration
from shalekv.cli.pairs.columns import Columns
from shalekv.cli.pairs.file_format import FileFormat, file_format_option, format_of_name
from shalekv.cli.pairs.reading import Reading

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

MIB = 1024 * 1024
BATCH_COUNT_MAX = 1_000_000
BATCH_BYTES_MAX = 64 * MIB
RATE_MAX = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ReadingWords:
    """What the options say of the input."""

    file_format: FileFormat | None
    key_column: str | None
    value_column: str | None
    header: bool | None
    ttl_ms: int | None

    def reading(self, name: str, encoding: Encoding) -> Reading:
        """How to read a file of this name."""
        columns = Columns(self.key_column, self.value_column, self.header, encoding)
        return Reading(self.file_format or format_of_name(name), columns, self.ttl_ms or 0)


@dataclass(frozen=True, slots=True)
class SendingWords:
    """What the options say of the writes."""

    batch_count: int
    batch_bytes: int
    in_flight: int
    rate: float | None


def reading_options(command: CommandT) -> CommandT:
    """A decorator that adds the options of the input, as the argument `words`."""
    names = ("file_format", "key_column", "value_column", "header", "ttl_ms")
    command = gathered("words", names, ReadingWords)(command)
    for option in reversed(
        [
            file_format_option(
                "--input-format",
                "The format of FILE.  [default: what its name or its first line tells]",
            ),
            click.option(
                "--key-column",
                metavar="COLUMN",
                help="The key: the name of a column or member, or the number of a column.",
            ),
            click.option("--value-column", metavar="COLUMN", help="The value, likewise."),
            click.option(
                "--header/--no-header",
                default=None,
                help="Whether the first row of TSV or CSV names the columns.  "
                "[default: if a column is given by name, and of CSV if none is given]",
            ),
            click.option(
                "--ttl",
                "ttl_ms",
                callback=duration,
                metavar="TIME",
                help="All pairs expire after this time: 500ms, 10s, 5m, 2h, 1d.",
            ),
        ]
    ):
        command = option(command)
    return command


def sending_options(command: CommandT) -> CommandT:
    """A decorator that adds the options of the writes, as the argument `sending`."""
    command = gathered(
        "sending", ("batch_count", "batch_bytes", "in_flight", "rate"), SendingWords
    )(command)
    for option in reversed(
        [
            click.option(
                "--batch-count",
                type=click.IntRange(1, BATCH_COUNT_MAX),
                default=1_000,
                show_default=True,
                metavar="ROWS",
                help="Most rows in one write.",
            ),
            click.option(
                "--batch-bytes",
                type=click.IntRange(1, BATCH_BYTES_MAX),
                default=MIB,
                show_default=True,
                metavar="BYTES",
                help="Most bytes in one write; a larger row is written alone.",
            ),
            click.option(
                "--in-flight",
                type=click.IntRange(1, 64),
                default=4,
                show_default=True,
                metavar="WRITES",
                help="Writes that are sent before the first is answered.",
            ),
            click.option(
                "--rate",
                type=click.FloatRange(0.1, RATE_MAX),
                metavar="ROWS_PER_S",
                help="No faster than this.  [default: as fast as it goes]",
            ),
        ]
    ):
        command = option(command)
    return command
