"""Amounts with a unit, as people type them: ``500ms``, ``10s``, ``5m``, ``2h``, ``1d``."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import click

_DURATION = re.compile(r"(\d{1,15})(ms|s|m|h|d)", re.ASCII)
_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str) -> int:
    """The milliseconds that `text` says; raises ValueError, which says what is wrong with it.

    A number alone is refused: other tools mean seconds, or milliseconds, by it.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no time with a unit, such as 500ms, 10s, 5m, 2h or 1d")
    milliseconds = int(found.group(1)) * _MS[found.group(2)]
    if not milliseconds:
        raise ValueError(f"'{text}' is no time at all")
    return milliseconds


def duration(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """The callback of an option that takes a time, in milliseconds for the command."""
    if value is None:
        return None
    try:
        return duration_ms(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


# --- measures
# Amounts in few characters, for people: sizes, durations, rates.


_KIB = 1024.0
US_PER_MS, US_PER_S = 1_000.0, 1_000_000.0


def rate(value: float) -> str:
    """So many a second: ``-`` when there was nothing."""
    return "-" if not value else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"  # noqa: PLR2004


def size(value: float | None) -> str:
    """Such as ``3.0 MiB``."""
    if value is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIB:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= _KIB
    return f"{value:,.1f} TiB"


def share(value: int, most: int) -> str:
    """Such as ``1.0 MiB / 2.0 GiB``; without the bound if there is none."""
    return f"{size(value)} / {size(most)}" if most else size(value)


def time(us: float | None) -> str:
    """Such as ``250 us``, ``1.5 ms``, ``3.2 s`` or ``2.0 h``."""
    if us is None:
        return "-"
    if us < US_PER_MS:
        return f"{us:,.0f} us"
    if us < US_PER_S:
        return f"{us / US_PER_MS:,.1f} ms"
    seconds = us / US_PER_S
    return f"{seconds:,.1f} s" if seconds < 3_600 else f"{seconds / 3_600:,.1f} h"  # noqa: PLR2004


def moment(time_s: int) -> str:
    """A time of day, of a time since the Unix epoch; 0 is never."""
    if not time_s:
        return "never"
    return datetime.fromtimestamp(time_s, UTC).isoformat(sep=" ", timespec="seconds")
