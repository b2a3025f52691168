"""`shalekv load`: put many pairs from a file or standard input."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import click

from shalekv.cli.console.connection import (
    Target,
    durability_option,
    exit_codes_of_calls,
    target_options,
)
from shalekv.cli.console.keys import Encoding, encoding_options
from shalekv.cli.console.output import Format, brief_format_option
from shalekv.cli.load.options import (
    BulkFlags,
    InputFlags,
    SendFlags,
    bulk_options,
    reading_options,
    sending_options,
)
from shalekv.cli.load.run import LoadRun, run_load
from shalekv.cli.load.source import InputSource
from shalekv_client import Durability

_HELP = """Put every pair of FILE (- or nothing: standard input), in batches.

\b
TSV     A line is a key, a TAB and a value, taken byte by byte unless an encoding is chosen.
CSV     A header names the columns key and value, unless options choose others.
NDJSON  Each line is an object, as written by `shalekv dump` and `shalekv scan --format json`. The
        members key_hex, key_base64 and key_escaped are binary; expire_at_ms is kept.

The format follows from the extension of FILE (.tsv, .csv, .ndjson, .jsonl, optionally with .gz);
another one needs --input-format. Without an extension, input whose first line begins with { and has
no TAB is NDJSON, and other input is TSV. Gzip is decompressed.

It is safe to load a file again: the same rows lead to the same state. If several rows have the same
key, the last one wins. The first bad row, the first batch that fails, or Ctrl-C (exit code 130)
ends the load, which then prints up to which line everything is stored; with --resume the next load
continues there.

With --bulk, rows are not sent to the server. They are sorted, on a disk if they do not fit in
memory, and written into the object store as files. One commit publishes these: all rows or none,
newer than all earlier writes. Use it for files that are too large to send through a server. Each
bulk load has an id. With --load-id, a load that is repeated after a crash is not committed twice.
Without it each run is a new load, because the same file may be loaded twice on purpose. --open is
for a database without a running server.

\b
Examples:
  python3 examples/unicode_names.py | shalekv load
  shalekv load names.tsv --batch-count 5000 --in-flight 8
  shalekv load people.csv --key-column email --value-column name
  shalekv load events.ndjson.gz --key-column id --value-column body --ttl 7d
  shalekv load all.tsv --resume all.state      repeat it after a crash to continue
  shalekv load all.tsv --bad-rows bad.ndjson   write bad rows there, with the problem
  shalekv dump | shalekv load --addr 10.0.0.7:7654
  shalekv load big.tsv --bulk --url file:///var/lib/shalekv --load-id monday
  shalekv load --escaped all.tsv          the output of `shalekv scan --escaped --format raw`
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls(reads_store=True))
@click.argument("file", type=click.File("rb"), default="-")
@reading_options
@sending_options
@click.option(
    "--resume",
    "state_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="STATE_FILE",
    help="Record in this file up to which line everything is stored, and continue there.",
)
@click.option(
    "--bad-rows",
    "bad_rows_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Write bad rows into this file, as NDJSON with line and problem, and continue.",
)
@click.option(
    "--progress/--no-progress", default=None, help="Show a bar.  [default: on a terminal]"
)
@bulk_options
@encoding_options
@brief_format_option("sentences")
@durability_option
@target_options
def load(  # noqa: PLR0913 (click passes each option by its name)
    *,
    file: BinaryIO,
    input_flags: InputFlags,
    sending: SendFlags,
    state_path: Path | None,
    bad_rows_path: Path | None,
    progress: bool | None,
    bulk: BulkFlags | None,
    encoding: Encoding,
    output_format: Format | None,
    durability: Durability,
    target: Target,
) -> None:
    """Load, and print the totals."""
    source = InputSource(file)
    reading = input_flags.input_options(str(getattr(file, "name", "")), encoding)
    if bulk is not None:
        from shalekv.cli.load.bulk import BulkPlan, run_bulk  # noqa: PLC0415 (of the server)

        run_bulk(BulkPlan(source, reading, bulk, bad_rows_path, progress), target, output_format)
        return
    plan = LoadRun(source, reading, sending, durability, state_path, bad_rows_path, progress)
    run_load(plan, target, output_format)
