"""The options of `shalekv bench` that say how much of what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from shalekv.cli.benchmark.work import Shape, Through
from shalekv.cli.console.connection import durability_option
from shalekv.cli.console.option_groups import gathered
from shalekv.cli.console.units import duration

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

DURATION_MS = 5_000
DURATION_MS_MAX = 3_600_000
NAMES = tuple(
    "clients through duration_ms count keys value_bytes read_percent scan_rows durability".split()
)

_OPTIONS = (
    click.option(
        "--clients",
        type=click.IntRange(1, 10_000),
        default=16,
        show_default=True,
        metavar="COUNT",
        help="How many ask at the same time.",
    ),
    click.option(
        "--through",
        type=click.Choice([way.value for way in Through]),
        default=Through.COALESCED.value,
        show_default=True,
        help="A call for each operation; operations of all clients together, as the Python client "
        "does; or a session for each client.",
    ),
    click.option(
        "--duration",
        "duration_ms",
        callback=duration,
        metavar="TIME",
        help="How long each of OPERATIONS is asked for, such as 500ms, 10s, 5m.  [default: 5s]",
    ),
    click.option(
        "--count",
        type=click.IntRange(min=1),
        metavar="COUNT",
        help="How often each of OPERATIONS is asked for, instead of --duration.",
    ),
    click.option(
        "--keys",
        type=click.IntRange(1, 10**9),
        default=10_000,
        show_default=True,
        metavar="COUNT",
        help="How many keys there are.",
    ),
    click.option(
        "--value-bytes",
        type=click.IntRange(min=0),
        default=100,
        show_default=True,
        metavar="BYTES",
        help="How large each value is.",
    ),
    click.option(
        "--read-percent",
        type=click.IntRange(0, 100),
        default=50,
        show_default=True,
        metavar="PERCENT",
        help="How many operations of mixed are gets.",
    ),
    click.option(
        "--scan-rows",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        metavar="ROWS",
        help="How many rows a scan reads.",
    ),
    durability_option,
)


def shape_options(command: CommandT) -> CommandT:
    """A decorator that adds all of them, as the argument `shape`."""
    command = gathered("shape", NAMES, _shape)(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _shape(*, through: str, duration_ms: int | None, count: int | None, **given: Any) -> Shape:
    if duration_ms is not None and count is not None:
        raise click.UsageError("--duration and --count exclude each other")
    if (duration_ms or 0) > DURATION_MS_MAX:
        raise click.UsageError("--duration: an hour is the most")
    duration_s = None if count else (duration_ms or DURATION_MS) / 1000.0
    return Shape(through=Through(through), duration_s=duration_s, count=count, **given)
