"""Quantities for people: durations to be parsed; sizes, durations, times and rates to be printed.

Durations are typed with a unit: ``500ms``, ``10s``, ``5m``, ``2h``, ``1d``. Sizes are printed in
binary units, as settings take them: 1 KiB is 1,024 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import click

from shalekv.wording import MS_PER_S, moment

_DURATION = re.compile(r"(\d{1,15})(ms|s|m|h|d)", re.ASCII)
_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_KIB = 1024.0
US_PER_MS, US_PER_S = 1_000.0, 1_000_000.0
EXACT_BYTES = 10_000  # below it, sizes are printed to the byte
NEVER = "never"

# The longest durations of each unit, in microseconds, and the unit in microseconds. From 59.95 min
# on, which would be rounded to 60 min, it is 1 h.
_DURATIONS = (
    (US_PER_S, "ms", US_PER_MS),
    (120 * US_PER_S, "s", US_PER_S),
    (3_597 * US_PER_S, "min", 60 * US_PER_S),
    (172_800 * US_PER_S, "h", 3_600 * US_PER_S),
)
_DAY_US = 86_400 * US_PER_S
# The name of a quantity: a stem, its unit, whether it is a limit, and its places in lists.
_NAME = re.compile(
    r"(?P<stem>|.*?[._])(?P<unit>bytes|at_ms|time_ms|time_s|ms|us|s)(?P<limit>(?:_max|_min)?)"
    r"(?P<places>(?:\.\d+)*)"
)
_TIMES = frozenset({"at_ms", "time_ms", "time_s"})
_EXPIRY = ("expire_", "expires_")


def duration_ms(text: str) -> int:
    """Parse a duration into milliseconds. Raises ValueError with the problem.

    A number without a unit is refused: some tools mean seconds by it, others milliseconds.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        if text.isdecimal():
            raise ValueError(f"'{text}' has no unit: write {text}s for seconds, or ms, m, h or d")
        raise ValueError(f"'{text}' is not a duration, such as 500ms, 10s, 5m, 2h or 1d")
    milliseconds = int(found.group(1)) * _MS[found.group(2)]
    if not milliseconds:
        raise ValueError(f"the time must be more than zero, and '{text}' is not")
    return milliseconds


def ttl_ms(text: str) -> int:
    """Parse a time to live, a duration or ``never``, into milliseconds; 0 is never.

    Raises ValueError with the problem.
    """
    return 0 if text == NEVER else duration_ms(text)


def duration(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Click callback of an option that takes a duration; the command gets milliseconds."""
    if value is None:
        return None
    try:
        return duration_ms(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def rate(value: float) -> str:
    """Format a number per second; ``-`` for 0."""
    return "-" if not value else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"  # noqa: PLR2004


def size(value: float | None) -> str:
    """Format bytes, such as ``512 B`` or ``3.0 MiB``; ``?`` for None."""
    if value is None:
        return "?"
    if value < EXACT_BYTES:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= _KIB
        if value < _KIB:
            return f"{value:.1f} {unit}"
    return f"{value / _KIB:,.1f} TiB"


def share(value: int, most: int) -> str:
    """Format bytes of a limit, such as ``1.0 MiB / 2.0 GiB``; without the limit if it is 0."""
    return f"{size(value)} / {size(most)}" if most else size(value)


def time(us: float | None) -> str:
    """Format microseconds: ``250 us``, ``1.5 ms``, ``34 s``, ``2.5 h``; ``-`` for None."""
    if us is None:
        return "-"
    if us < US_PER_MS:
        return f"{us:.0f} us" if us else "0 s"
    for below_us, unit, unit_us in _DURATIONS:
        if us < below_us:
            return f"{_short(us / unit_us)} {unit}"
    return f"{_short(us / _DAY_US)} d"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")  # noqa: PLR2004


def heading(name: str) -> str:
    """Convert the name of a value to a heading: without its unit, which each cell has."""
    found = _quantity(name)
    if found is None:
        return name
    stem, unit = found["stem"], found["unit"]
    if not stem.endswith("_"):
        stem += "size" if unit == "bytes" else unit
    elif unit in _TIMES and stem.endswith(_EXPIRY):
        stem = stem.rstrip("s_") + "s"
    elif unit.startswith("time_"):
        stem += "time"
    return stem.rstrip("_") + found["limit"] + found["places"]


def headings(names: Sequence[str]) -> Sequence[str]:
    """Convert the names of columns to headings, which all differ."""
    short = [heading(name) for name in names]
    return [
        each if short.count(each) == 1 else name for each, name in zip(short, names, strict=True)
    ]


def cell_format(name: str) -> Callable[[object], str]:
    """Return how cells of a column, or values of this name, are printed: by the unit in the name.

    Numbers without a unit are printed with all their digits, and without commas: most are ids.
    """
    found = _quantity(name)
    if found is None:
        return _cell
    unit, stem = found["unit"], found["stem"]
    is_expiry = unit in _TIMES and stem.endswith(_EXPIRY)

    def quantity(value: object) -> str:
        if is_expiry and (value is None or value == 0):
            return NEVER
        if isinstance(value, bool) or not isinstance(value, int | float):
            return _cell(value)
        return _with_unit(unit, value)

    return quantity


def is_time(name: str) -> bool:
    """Return whether values of this name are points in time."""
    found = _quantity(name)
    return found is not None and found["unit"] in _TIMES


def _quantity(name: str) -> re.Match[str] | None:
    found = _NAME.fullmatch(name)
    is_rate = found is not None and found["stem"].endswith("per_")  # such as `calls_per_s`
    return None if is_rate else found


def _with_unit(unit: str, value: float) -> str:
    match unit:
        case "bytes":
            return size(value)
        case "at_ms" | "time_ms":
            return moment(round(value)) if value else "-"
        case "time_s":
            return moment(round(value * MS_PER_S)) if value else "-"
        case "ms":
            return time(value * US_PER_MS)
        case "s":
            return time(value * US_PER_S)
        case _:
            return time(value)


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f}" if abs(value) >= 1 or not value else f"{value:.2g}"
        case _:
            return str(value)
