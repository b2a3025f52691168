"""`shalekv compaction`: simulate settings of compaction under a workload.

A sweep compares the default settings with changes of one setting at a time. The results can be
drawn as SVG: a panel for each workload, a dot for each setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import click
from pydantic import ValidationError

from shalekv.cli.console.configuration import plain_message
from shalekv.cli.console.exit_codes import ExitCode, exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv.protocol.compaction.l0 import SourceChoice
from shalekv.protocol.compaction.outcome import Setup, Simulated
from shalekv.protocol.compaction.simulate import simulate as run_simulation
from shalekv.protocol.compaction.workload import NAMED, Workload
from shalekv.settings.model import GIB, KIB, MIB

DEFAULTS = "defaults"
COLUMNS = (
    "workload",
    "setting",
    "write_amp",
    "read_amp",
    "space_amp",
    "space_amp_max",
    "l0_max",
    "wal_max_mib",
    "ssts",
    "jobs",
    "stalled_s",
    "requests_usd",
    "storage_usd",
)

_SIZE = re.compile(r"(\d{1,15})(B|KiB|MiB|GiB)", re.ASCII)
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_VARIED: Mapping[str, str] = {
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

# The picture.
_WIDTH, _HEIGHT = 460, 360  # of a panel
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 40, 110, 50
_COLOURS = "#1b6ca8 #c0392b #27813f #8e44ad #b9770e #16807a #5d6d7e".split()
_TICKS = 4
_Scale = tuple[Callable[[float], float], float, float]  # value to coordinate; minimum, maximum

_HELP = f"""Simulate the compaction policy under workloads, without a store and in simulated time.

WORKLOAD is one or more of {", ".join(NAMED)}; the default is all of them. Each is simulated with
the default settings, and with each of the values of --vary in place of one default.

\b
write_amp      bytes of WAL objects and SSTs written, per byte written by clients
read_amp       SSTs whose range includes a key that is read; filters skip most of them
space_amp      bytes in the levels per byte of live data, after compaction has finished
space_amp_max  the maximum during the writes, including the WAL
requests_usd   US dollars for the requests of a month at this rate, at the public prices of S3
storage_usd    US dollars for a month of storage, including garbage

\b
Examples:
  shalekv compaction simulate
  shalekv compaction simulate uniform --vary l0_trigger_count=2,4,8 --picture l0.svg
  shalekv compaction simulate timeseries --vary none --over-time
"""


def picture(rows: Sequence[SimulationRow]) -> str:
    """Draw an SVG: x is write amplification, y space, and the size of a dot reads."""
    panels = [(name, [*group]) for name, group in groupby(rows, key=lambda row: row.workload)]
    body = "\n".join(
        line for number, (name, group) in enumerate(panels) for line in _panel(number, name, group)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(panels)}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _panel(number: int, name: str, rows: Sequence[SimulationRow]) -> Iterator[str]:
    found = [row.simulated.amplification for row in rows]
    write = _scale([each.write for each in found], _LEFT, _WIDTH - _RIGHT)
    space = _scale([each.space_max for each in found], _HEIGHT - _BOTTOM, _TOP)
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    yield f'<g transform="translate({number * _WIDTH} 0)">'
    yield _text(_LEFT, _TOP - 18, name, 'font-weight="bold" font-size="14"')
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>'
    for value, at in _ticks(write):
        yield _text(at, bottom + 16, value, 'text-anchor="middle"')
    for value, at in _ticks(space):
        yield _text(_LEFT - 6, at + 4, value, 'text-anchor="end"')
    yield _text((_LEFT + right) / 2, bottom + 36, "write amplification", 'text-anchor="middle"')
    turned = f'text-anchor="middle" transform="rotate(-90 16 {_HEIGHT / 2})"'
    yield _text(16, _HEIGHT / 2, "space amplification, most", turned)
    settings = [*dict.fromkeys(row.setting.partition("=")[0] for row in rows)]
    for row, each in zip(rows, found, strict=True):
        colour = _COLOURS[settings.index(row.setting.partition("=")[0]) % len(_COLOURS)]
        x, y = write[0](each.write), space[0](each.space_max)
        ring = ' stroke="black" stroke-width="2"' if row.setting == DEFAULTS else ""
        size = 2 + each.read
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill="{colour}" '
            f'fill-opacity="0.6"{ring}/>'
        )
        yield _text(x + size + 2, y + 4, row.setting, f'fill="{colour}" font-size="9"')
    yield "</g>"


def _scale(values: Sequence[float], start: float, stop: float) -> _Scale:
    spare = max((max(values) - min(values)) * 0.1, 0.01)
    least, most = min(values) - spare, max(values) + spare
    return lambda value: start + (value - least) / (most - least) * (stop - start), least, most


def _ticks(scale: _Scale) -> Iterator[tuple[str, float]]:
    place, least, most = scale
    for number in range(_TICKS + 1):
        value = least + (most - least) * number / _TICKS
        yield f"{value:.2f}", place(value)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


@dataclass(frozen=True, slots=True)
class Variation:
    """A setup with at most one changed setting, and its label in a row."""

    label: str
    setup: Setup


@dataclass(frozen=True, slots=True)
class SimulationRow:
    """The result of one simulation."""

    workload: str
    setting: str
    simulated: Simulated

    @property
    def cells(self) -> tuple[str | int | float, ...]:
        """The cells of `COLUMNS`."""
        found = self.simulated
        amplification = found.amplification
        return (
            self.workload,
            self.setting,
            round(amplification.write, 2),
            round(amplification.read, 2),
            round(amplification.space, 2),
            round(amplification.space_max, 2),
            found.l0_count_max,
            found.wal_bytes_max // MIB,
            found.sst_count,
            found.job_count,
            round(found.stalled_s),
            round(found.bill.requests_usd, 2),
            round(found.bill.storage_usd, 2),
        )


def size_bytes(text: str) -> int:
    """Parse a size such as 64MiB into bytes. Raises `ValueError`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no size with a unit, such as 512KiB, 64MiB or 2GiB")
    return int(found.group(1)) * _UNITS[found.group(2)]


def variations(values: Mapping[str, Sequence[str]]) -> Iterator[Variation]:
    """Yield the defaults, then each value of each setting alone. Raises `click.BadParameter`."""
    setup = Setup()
    yield Variation(DEFAULTS, setup)
    for name, texts in values.items():
        for text in texts:
            try:
                yield Variation(f"{name}={text}", _changed(setup, name, text))
            except ValidationError as error:
                problem = plain_message(error.errors()[0])
                raise click.BadParameter(f"{name}={text}: {problem}") from None
            except ValueError as error:
                raise click.BadParameter(str(error)) from None


def rows(
    workloads: Mapping[str, Workload], compared: Sequence[Variation]
) -> Iterator[SimulationRow]:
    """Simulate every variation under every workload, and yield the results one by one."""
    for name, workload in workloads.items():
        for variation in compared:
            yield SimulationRow(name, variation.label, run_simulation(workload, variation.setup))


def _changed(setup: Setup, name: str, text: str) -> Setup:
    if name == "source_choice":
        return replace(setup, choice=SourceChoice(text))
    value = size_bytes(text) if name.endswith("bytes") else int(text)
    if name in type(setup.levels).model_fields:
        levels = setup.levels.model_dump() | {name: value}
        return replace(setup, levels=type(setup.levels).model_validate(levels))
    compactor = setup.compactor.model_dump() | {name: value}
    return replace(setup, compactor=type(setup.compactor).model_validate(compactor))


@click.group()
def compaction() -> None:
    """Simulate compaction with other settings."""


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
    help=f"Values of one of {', '.join(_VARIED)}; repeatable. `none`: only the defaults.",
)
@click.option(
    "--written",
    "written_bytes",
    metavar="SIZE",
    callback=_written,
    help="Total bytes that clients write, such as 2GiB.  [default: 16 or 24 GiB]",
)
@click.option(
    "--rate",
    "rate_bytes",
    metavar="SIZE",
    callback=_written,
    help="Bytes that clients write per second.  [default: 5 MB]",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of random numbers.")
@click.option("--over-time", is_flag=True, help="Print samples over time instead of the results.")
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


def _over_time(row: SimulationRow) -> list[tuple[str | int | float, ...]]:
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
