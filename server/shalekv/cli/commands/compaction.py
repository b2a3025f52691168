"""`shalekv compaction`: what settings of compaction would do to a workload, simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from shalekv.cli.compaction_picture import picture
from shalekv.cli.compaction_sweep import COLUMNS, Row, rows, size_bytes, variations
from shalekv.cli.console.exit_codes import ExitCode, exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv.protocol.compaction.workload import NAMED
from shalekv.settings.model import MIB

_VARIED: Mapping[str, str] = {
    "level_multiplier_count": "4,6,16",
    "l0_trigger_count": "2,8",
    "base_level_bytes": "64MiB,512MiB",
    "sst_bytes": "64MiB,128MiB",
    "wal_trigger_bytes": "8MiB,32MiB",
    "source_choice": "oldest",
}
_SAMPLE_COLUMNS = (
    "workload",
    "setting",
    "elapsed_s",
    "live_mib",
    "wal_mib",
    "l0_count",
    "levels_mib",
    "read_amp",
    "space_amp",
)

_HELP = f"""Run the policy of compaction against workloads, without a store and without waiting.

WORKLOAD is one or more of {", ".join(NAMED)}; not given: all of them. Each is tried with the
default settings, and with each of the values of --vary in place of one default.

\b
write_amp      bytes of WAL objects and SSTs written, for a byte that clients write
read_amp       SSTs whose range has a key that is read; filters skip most of them
space_amp      bytes in the levels for a byte that clients would find, when all is settled
space_amp_max  the same while writing, the WAL included
requests_usd   US dollars for the requests of a month of this, at the public prices of S3
storage_usd    the same for the bytes that are kept, garbage included

\b
Examples:
  shalekv compaction simulate
  shalekv compaction simulate uniform --vary l0_trigger_count=2,4,8 --picture l0.svg
  shalekv compaction simulate timeseries --vary none --over-time
"""


@click.group()
def compaction() -> None:
    """Try settings of compaction out."""


def _varied(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> dict[str, list[str]]:
    if not given:
        return {name: texts.split(",") for name, texts in _VARIED.items()}
    if given == ("none",):
        return {}
    values: dict[str, list[str]] = {}
    for text in given:
        name, _, texts = text.partition("=")
        if name not in _VARIED or not texts:
            expected = ", ".join(_VARIED)
            raise click.BadParameter(f"'{text}' is not SETTING=VALUE,... with one of {expected}")
        values.setdefault(name, []).extend(texts.split(","))
    return values


def _written(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else size_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@compaction.command(help=_HELP, epilog=exit_codes_text())
@click.argument("workloads", metavar="[WORKLOAD]...", nargs=-1, type=click.Choice([*NAMED]))
@click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="SETTING=VALUE,...",
    callback=_varied,
    help=f"Values of one of {', '.join(_VARIED)}; may be repeated. `none`: the defaults alone.",
)
@click.option(
    "--written",
    "written_bytes",
    metavar="SIZE",
    callback=_written,
    help="How much clients write in all, such as 2GiB.  [default: 16 or 24 GiB]",
)
@click.option(
    "--rate",
    "rate_bytes",
    metavar="SIZE",
    callback=_written,
    help="How much clients write in a second.  [default: 5 MB]",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of all that is random.")
@click.option("--over-time", is_flag=True, help="Print how each went on, not how it ended.")
@click.option(
    "--picture",
    "picture_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Draw the trade-offs as SVG into this file.",
)
@format_option
def simulate(
    *,
    workloads: tuple[str, ...],
    varied: dict[str, list[str]],
    written_bytes: int | None,
    rate_bytes: int | None,
    seed: int,
    over_time: bool,
    picture_file: Path | None,
    output_format: Format,
) -> None:
    """Print a row for each simulation."""
    compared = [*variations(varied)]
    chosen = {}
    for name in workloads or NAMED:
        workload = replace(NAMED[name], seed=seed)
        if written_bytes is not None:
            workload = replace(workload, written_bytes=written_bytes)
        if rate_bytes is not None:
            workload = replace(workload, write_bytes_per_s=float(rate_bytes))
        chosen[name] = workload
    done = [*rows(chosen, compared)]
    if picture_file is not None:
        try:
            picture_file.write_text(picture(done), encoding="utf-8")
        except OSError as error:
            click.echo(f"Error: {picture_file}: {error.strerror}", err=True)
            raise SystemExit(ExitCode.OUTPUT) from None
    with printing():
        if over_time:
            samples = [cells for row in done for cells in _over_time(row)]
            print_rows(output_format, _SAMPLE_COLUMNS, samples)
        else:
            print_rows(output_format, COLUMNS, (row.cells for row in done))


def _over_time(row: Row) -> list[tuple[str | int | float, ...]]:
    return [
        (
            row.workload,
            row.setting,
            round(sample.elapsed_s),
            sample.live_bytes // MIB,
            sample.wal_bytes // MIB,
            sample.l0_count,
            " ".join(f"L{n}:{size // MIB}" for n, size in sorted(sample.level_bytes.items())),
            round(sample.read, 2),
            round(sample.space, 2),
        )
        for sample in row.simulated.samples
    ]
