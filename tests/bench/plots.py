"""Plots of a run, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import Any

Json = dict[str, Any]

WIDTH, ROW, LEFT, RIGHT, TOP = 960, 22, 520, 70, 40
MET, MISSED, PLAIN = "#2a7f3f", "#b5382a", "#4a6fa5"
DECADES = 1.0  # to each side of the target
STYLE = "font-family='sans-serif' font-size='12'"


def write(results: Json, folder: Path) -> None:
    """Write the plots of a run into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "targets.svg").write_text(targets(results["measures"]))


def targets(measures: Sequence[Json]) -> str:
    """Return how far each figure is from its target, on a scale of ratios: right is better."""
    rows = [
        (f"{measure['title']}: {goal['text']}", _gain(goal), goal["is_met"])
        for measure in measures
        for goal in measure["goals"]
        if goal["is_met"] is not None and goal["median"] > 0
    ]
    height = TOP + ROW * len(rows) + 10
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' {STYLE}>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='{middle}' y='16' text-anchor='middle'>target</text>",
        f"<line x1='{middle}' y1='22' x2='{middle}' y2='{height - 8}' stroke='#888'/>",
    ]
    bar = "<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='13'"
    for number, (text, gain, is_met) in enumerate(rows):
        y = TOP + ROW * number
        share = max(-DECADES, min(DECADES, log10(gain))) / DECADES
        length = share * (WIDTH - LEFT - RIGHT) / 2
        begin, width = (middle, length) if length >= 0 else (middle + length, -length)
        colour = MET if is_met else MISSED
        parts += [
            f"<text x='{LEFT - 10}' y='{y + 4}' text-anchor='end'>{escape(text[:84])}</text>",
            bar.format(x=begin, y=y - 6, width=max(width, 1)) + f" fill='{colour}'/>",
            f"<text x='{WIDTH - RIGHT + 8}' y='{y + 4}'>{gain:.2f}</text>",
        ]
    return "\n".join([*parts, "</svg>\n"])


def _gain(goal: Json) -> float:
    """Return how many times better than its target a figure is: below 1 it is missed."""
    sign, limit = goal["target"].split()[:2]
    ratio = goal["median"] / float(limit)
    return float(ratio if sign == "≥" else 1 / ratio)


def lines(title: str, unit: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    """Return curves over minutes."""
    width, height, left, bottom = 960, 360, 70, 40
    points = [point for curve in curves.values() for point in curve]
    last = max((x for x, _ in points), default=1.0) or 1.0
    most = max((y for _, y in points), default=1.0) * 1.1 or 1.0
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' {STYLE}>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='{left}' y='20'>{escape(title)}</text>",
    ]
    for step in range(5):
        y = height - bottom - (height - bottom - 40) * step / 4
        parts.append(f"<line x1='{left}' x2='{width - 20}' y1='{y}' y2='{y}' stroke='#ddd'/>")
        label = f"{most * step / 4:.0f} {unit}"
        parts.append(f"<text x='{left - 6}' y='{y + 4}' text-anchor='end'>{escape(label)}</text>")
        x = left + (width - left - 20) * step / 4
        minutes = f"{last * step / 4:.1f} min"
        parts.append(f"<text x='{x}' y='{height - 16}' text-anchor='middle'>{minutes}</text>")
    for number, (name, curve) in enumerate(curves.items()):
        colour = (PLAIN, MISSED, MET, "#8a5fa5")[number % 4]
        drawn = " ".join(
            f"{left + (width - left - 20) * x / last:.1f},"
            f"{height - bottom - (height - bottom - 40) * y / most:.1f}"
            for x, y in curve
        )
        parts.append(f"<polyline points='{drawn}' fill='none' stroke='{colour}'/>")
        parts.append(
            f"<text x='{width - 220}' y='{20 + 16 * number}' fill='{colour}'>{name}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])
