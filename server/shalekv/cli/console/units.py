"""Amounts with a unit, as people type them: ``500ms``, ``10s``, ``5m``, ``2h``, ``1d``."""

from __future__ import annotations

import re

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
