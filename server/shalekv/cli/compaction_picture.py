"""Draws simulations as SVG: a panel for each workload, a dot for each setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from shalekv.cli.compaction_sweep import DEFAULTS, Row

_WIDTH, _HEIGHT = 460, 360  # of a panel
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 40, 110, 50
_COLOURS = "#1b6ca8 #c0392b #27813f #8e44ad #b9770e #16807a #5d6d7e".split()
_TICKS = 4


def picture(rows: Sequence[Row]) -> str:
    """The SVG: write amplification to the right, space upwards, a dot larger with reads."""
    panels = [(name, [*group]) for name, group in groupby(rows, key=lambda row: row.workload)]
    body = "\n".join(
        line for number, (name, group) in enumerate(panels) for line in _panel(number, name, group)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(panels)}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _panel(number: int, name: str, rows: Sequence[Row]) -> Iterator[str]:
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


_Scale = tuple[Callable[[float], float], float, float]  # of a value to its place; least, most


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
