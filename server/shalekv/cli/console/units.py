"""Quantities for people: durations to be parsed, and sizes, durations and rates to be printed.

Durations are typed with a unit: ``500ms``, ``10s``, ``5m``, ``2h``, ``1d``.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import click

_DURATION = re.compile(r"(\d{1,15})(ms|s|m|h|d)", re.ASCII)
_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_KIB = 1024.0
NEVER = "never"
US_PER_MS, US_PER_S = 1_000.0, 1_000_000.0


def duration_ms(text: str) -> int:
    """Parse a duration into milliseconds. Raises ValueError with the problem.

    A number without a unit is refused: some tools mean seconds by it, others milliseconds.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no time with a unit, such as 500ms, 10s, 5m, 2h or 1d")
    milliseconds = int(found.group(1)) * _MS[found.group(2)]
    if not milliseconds:
        raise ValueError(f"'{text}' is zero: the time must be positive")
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
    """Format bytes, such as ``3.0 MiB``; ``?`` for None."""
    if value is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIB:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= _KIB
    return f"{value:,.1f} TiB"


def share(value: int, most: int) -> str:
    """Format bytes of a limit, such as ``1.0 MiB / 2.0 GiB``; without the limit if it is 0."""
    return f"{size(value)} / {size(most)}" if most else size(value)


def time(us: float | None) -> str:
    """Format microseconds, such as ``250 us``, ``1.5 ms`` or ``2.0 h``; ``-`` for None."""
    if us is None:
        return "-"
    if us < US_PER_MS:
        return f"{us:,.0f} us"
    if us < US_PER_S:
        return f"{us / US_PER_MS:,.1f} ms"
    seconds = us / US_PER_S
    return f"{seconds:,.1f} s" if seconds < 3_600 else f"{seconds / 3_600:,.1f} h"  # noqa: PLR2004


def life(ms: float) -> str:
    """Format the time until something expires in its two largest units, such as ``29m 59s``."""
    if ms < _MS["s"]:
        return f"{ms:.0f}ms"
    left = round(ms / _MS["s"]) * _MS["s"]
    parts = []
    for unit in ("d", "h", "m", "s"):
        number, left = divmod(left, _MS[unit])
        parts.append(f"{number}{unit}" if number else "")
    first = next(at for at, part in enumerate(parts) if part)
    return " ".join(part for part in parts[first : first + 2] if part)


def moment(time_s: int) -> str:
    """Format seconds since the Unix epoch as a UTC date and time; ``never`` for 0."""
    if not time_s:
        return NEVER
    return datetime.fromtimestamp(time_s, UTC).isoformat(sep=" ", timespec="seconds")
