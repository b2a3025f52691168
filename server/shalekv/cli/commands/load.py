"""`shalekv load`: many pairs from a file or standard input."""

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
from shalekv.cli.load.options import (
    BulkWords,
    ReadingWords,
    SendingWords,
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
CSV     A header names the columns key and value, unless the options say otherwise.
NDJSON  Each line is an object, as `shalekv dump` and `shalekv scan --format json` write them. The
        members key_hex, key_base64 and key_escaped are binary; expire_at_ms is kept.

The name of FILE tells the format (.tsv, .csv, .ndjson, .jsonl, and .gz behind it). Without a name,
a first line that begins with { and has no TAB is NDJSON, all else TSV. Gzip is decompressed.

Loading again is safe: the same rows end in the same state, and of a key that stands in many rows
the last one wins. The first bad row, the first batch that fails, or Ctrl-C (exit code 130) ends the
load. It tells up to which line everything is stored; with --resume the next one goes on there.

With --bulk the rows are not sent to the server. They are sorted, on a disk as far as they do not
fit in memory, and written into the object store as files, which one commit publishes: all rows or
none, newer than all that was written before. It is for files with more rows than a server should
be bothered with. The load has an id: with --load-id, what is run again after a crash commits
nothing a second time. Without it each run is a load of its own, since the same file may be loaded
again on purpose. --open is for a database that no server serves.

\b
Examples:
  python3 examples/unicode_names.py | shalekv load
  shalekv load names.tsv --batch-count 5000 --in-flight 8
  shalekv load people.csv --key-column email --value-column name
  shalekv load events.ndjson.gz --key-column id --value-column body --ttl 7d
  shalekv load all.tsv --resume all.state      the same again, after a crash: goes on
  shalekv load all.tsv --bad-rows bad.ndjson   goes on, and tells there what was wrong
  shalekv dump | shalekv load --addr 10.0.0.7:7654
  shalekv load big.tsv --bulk --url file:///var/lib/shalekv --load-id monday
  shalekv load --escaped all.tsv          what `shalekv scan --escaped --format raw` printed
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
    help="Keep in this file up to where everything is stored, and go on there.",
)
@click.option(
    "--bad-rows",
    "bad_rows_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Write bad rows into this file, as NDJSON with line and problem, and go on.",
)
@click.option(
    "--progress/--no-progress", default=None, help="Show a bar.  [default: on a terminal]"
)
@bulk_options
@encoding_options
@durability_option
@target_options
def load(  # noqa: PLR0913 (click passes each option by its name)
    *,
    file: BinaryIO,
    words: ReadingWords,
    sending: SendingWords,
    state_path: Path | None,
    bad_rows_path: Path | None,
    progress: bool | None,
    bulk: BulkWords | None,
    encoding: Encoding,
    durability: Durability,
    target: Target,
) -> None:
    """Load, and print the totals."""
    source = InputSource(file)
    reading = words.reading(str(getattr(file, "name", "")), encoding)
    if bulk is not None:
        from shalekv.cli.load.bulk import BulkPlan, run_bulk  # noqa: PLC0415 (of the server)

        run_bulk(BulkPlan(source, reading, bulk, bad_rows_path, progress), target)
        return
    run_load(
        LoadRun(source, reading, sending, durability, state_path, bad_rows_path, progress), target
    )
