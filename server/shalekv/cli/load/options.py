"""Option groups of `shalekv load`: the input, the writes, and the bulk load.

Light to import, since every `shalekv load` needs it: the settings of a store stay text here, and
`shalekv.cli.console.configuration` parses them when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from shalekv.cli.console.keys import Encoding
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.units import duration
from shalekv.cli.console.variables import CONFIG_VARIABLE, URL_VARIABLE
from shalekv.cli.load.formats import FileFormat, file_format_option, format_of_name
from shalekv.cli.load.lines import ColumnChoice
from shalekv.cli.load.source import InputOptions

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

MIB = 1024 * 1024
BATCH_COUNT_MAX = 1_000_000
BATCH_BYTES_MAX = 64 * MIB
RATE_MAX = 1_000_000_000
SORT_MEMORY_BYTES = 256 * MIB
SORT_MEMORY_BYTES_MIN = 4 * MIB

# Settings that configure access to a store, as for the commands that read one.
STORE_OPTIONS: Mapping[str, str] = {
    "endpoint_url": "The endpoint of an S3 store that is not Amazon's.",
    "region": "The region of the bucket.",
    "path_style": "Whether the name of the bucket is in the path, and not in the host name.",
    "anonymous": "Whether requests are sent without credentials.",
    "cas": "How objects are created, which must match the database: native, or two_phase, which "
    "--records-url implies.",
    "records_url": "Where the records of two-phase creates are.",
}
SWITCHES = frozenset({"path_style", "anonymous"})

_FORMAT_FLAG = "--input-format"

# Options without a meaning for a bulk load, which writes files and one commit.
_WRITE_FLAGS = {
    "state_path": "--resume",
    "batch_count": "--batch-count",
    "batch_bytes": "--batch-bytes",
    "in_flight": "--in-flight",
    "rate": "--rate",
    "durability": "--durability",
}
_BULK_FLAGS = {
    "url": "--url",
    "load_id": "--load-id",
    "opens": "--open",
    "sort_memory_bytes": "--sort-memory",
    "temp_dir": "--temp-dir",
    "config": "--config",
    **{name: "--" + name.replace("_", "-") for name in STORE_OPTIONS},
}


@dataclass(frozen=True, slots=True)
class InputFlags:
    """The options for reading the input, as given."""

    file_format: FileFormat | None
    key_column: str | None
    value_column: str | None
    header: bool | None
    ttl_ms: int | None

    def input_options(self, name: str, encoding: Encoding) -> InputOptions:
        """The options for reading a file called `name`."""
        columns = ColumnChoice(self.key_column, self.value_column, self.header, encoding)
        file_format = self.file_format or format_of_name(name, _FORMAT_FLAG)
        return InputOptions(file_format, columns, self.ttl_ms or 0)


@dataclass(frozen=True, slots=True)
class SendFlags:
    """The options for the writes, as given."""

    batch_count: int
    batch_bytes: int
    in_flight: int
    rate: float | None


def reading_options(command: CommandT) -> CommandT:
    """A decorator that adds the options of the input, as the argument `input_flags`."""
    names = ("file_format", "key_column", "value_column", "header", "ttl_ms")
    command = grouped_options("input_flags", names, InputFlags)(command)
    for option in reversed(
        [
            file_format_option(
                _FORMAT_FLAG,
                "The format of FILE.  [default: by its name or its first line]",
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
                "[default: yes if a column is given by name, and for CSV if none is given]",
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
    command = grouped_options(
        "sending", ("batch_count", "batch_bytes", "in_flight", "rate"), SendFlags
    )(command)
    for option in reversed(
        [
            click.option(
                "--batch-count",
                type=click.IntRange(1, BATCH_COUNT_MAX),
                default=1_000,
                show_default=True,
                metavar="ROWS",
                help="Maximum number of rows in one write.",
            ),
            click.option(
                "--batch-bytes",
                type=click.IntRange(1, BATCH_BYTES_MAX),
                default=MIB,
                show_default=True,
                metavar="BYTES",
                help="Maximum bytes in one write; a larger row is written alone.",
            ),
            click.option(
                "--in-flight",
                type=click.IntRange(1, 64),
                default=4,
                show_default=True,
                metavar="WRITES",
                help="Maximum number of concurrent writes.",
            ),
            click.option(
                "--rate",
                type=click.FloatRange(0.1, RATE_MAX),
                metavar="ROWS_PER_S",
                help="Maximum rate.  [default: no limit]",
            ),
        ]
    ):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class BulkFlags:
    """The options of a bulk load, as given."""

    url: str
    load_id: str | None
    opens: bool  # commit as a writer, instead of by a server
    sort_memory_bytes: int
    temp_dir: Path | None
    config: Path | None
    store: Mapping[str, Any]  # settings by name; None: not given


def bulk_options(command: CommandT) -> CommandT:
    """A decorator that adds the options of a bulk load, as the argument `bulk`.

    Without --bulk the argument is None. Options that exclude each other are a usage error.
    """
    names = ("is_bulk", *_BULK_FLAGS)
    command = grouped_options("bulk", names, _bulk_flags)(command)
    for option in reversed([*_bulk_option_list(), *map(_store_option, STORE_OPTIONS)]):
        command = option(command)
    return command


def _bulk_option_list() -> list[Callable[[Any], Any]]:
    return [
        click.option(
            "--bulk",
            "is_bulk",
            is_flag=True,
            help="Write sorted files into the object store, and commit them at once.",
        ),
        click.option(
            "--url",
            envvar=URL_VARIABLE,
            show_envvar=True,
            metavar="URL",
            help="With --bulk: the database, such as file:///var/lib/shalekv.",
        ),
        click.option(
            "--load-id",
            metavar="ID",
            help="With --bulk: the id of this load, which is committed at most once. It must not "
            "end in a hyphen and a number, such as 2026-11: those ids are for batches of streams.  "
            "[default: a new random id]",
        ),
        click.option(
            "--open",
            "opens",
            is_flag=True,
            help="With --bulk: commit without a server, by opening the database as its writer. "
            "This fences a server that writes to it, which ends. Flags of TLS are then those of "
            "connections to safekeepers.",
        ),
        click.option(
            "--sort-memory",
            "sort_memory_bytes",
            type=click.IntRange(min=SORT_MEMORY_BYTES_MIN),
            default=SORT_MEMORY_BYTES,
            show_default=True,
            metavar="BYTES",
            help="With --bulk: memory for sorting rows. Rows that do not fit go to a disk.",
        ),
        click.option(
            "--temp-dir",
            type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
            metavar="FOLDER",
            help="With --bulk: the folder for rows that do not fit in memory.  [default: that of "
            "the system for temporary files]",
        ),
        click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            envvar=CONFIG_VARIABLE,
            show_envvar=True,
            help="With --bulk: a TOML file with settings of the store, the levels and limits.",
        ),
    ]


def _store_option(name: str) -> Callable[[Any], Any]:
    flag = "--" + name.replace("_", "-")
    is_switch = name in SWITCHES
    return click.option(
        f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag,
        name,
        default=None,
        metavar=None if is_switch else "TEXT",
        help=f"With --bulk: {STORE_OPTIONS[name][0].lower()}{STORE_OPTIONS[name][1:]}",
    )


def _bulk_flags(*, is_bulk: bool, **given: Any) -> BulkFlags | None:
    context = click.get_current_context()

    def refuse(options: Mapping[str, str], why: str) -> None:
        for name, flag in options.items():
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{flag} {why}")

    if not is_bulk:
        refuse(_BULK_FLAGS, "is for --bulk")
        return None
    refuse(_WRITE_FLAGS, "is for writes in batches, and --bulk makes one commit of files")
    if not given["url"]:
        raise click.UsageError("--bulk needs --url: it writes files into the store of a database")
    if given["opens"]:
        others = {"addr": "--addr", "timeout_ms": "--timeout-ms", "reads": "--reads"}
        refuse(others, "is for a server, and --open uses none")
    if given["load_id"] == "":
        raise click.UsageError("--load-id is empty")
    store = {name: given.pop(name) for name in STORE_OPTIONS}
    return BulkFlags(**given, store=store)
