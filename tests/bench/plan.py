"""Values of a benchmark: what is measured, which ratio is the target, and what was found."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.bench.stage import Stage

Samples = list[float]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of a measure, most often a ratio to a peer or to a physical limit.

    Without a target it is shown beside the others.
    """

    key: str
    text: str  # such as "calls/s, etcd = 1"
    at_least: float | None = None
    at_most: float | None = None
    stretch: float | None = None
    unit: str = ""

    def is_met(self, value: float) -> bool | None:
        """None: there is no target."""
        if self.at_least is not None:
            return value >= self.at_least
        if self.at_most is not None:
            return value <= self.at_most
        return None

    @property
    def target(self) -> str:
        """Return the target and what is hoped for, as text."""
        limit = self.at_least if self.at_least is not None else self.at_most
        if limit is None:
            return ""
        sign = "≥" if self.at_least is not None else "≤"
        more = f" ({self.stretch:g})" if self.stretch is not None else ""
        return f"{sign} {limit:g}{more}"


class Found:
    """Result of one measure: samples of its goals, and figures of each side."""

    def __init__(self) -> None:
        self.samples: dict[str, Samples] = defaultdict(list)
        self.sides: dict[str, dict[str, Samples]] = defaultdict(lambda: defaultdict(list))
        self.notes: list[str] = []

    def add(self, key: str, *values: float) -> None:
        """Add samples of the goal `key`."""
        self.samples[key].extend(values)

    def side(self, name: str, figures: Mapping[str, float]) -> None:
        """Add a sample of each of these figures of the side `name`."""
        side = self.sides[name]
        for figure, value in figures.items():
            side[figure].append(value)

    def ratio(self, key: str, figure: str, side: str, beside: str) -> None:
        """Add samples of a goal: a figure of a side in units of that of another, pair by pair."""
        pairs = zip(self.sides[side][figure], self.sides[beside][figure], strict=True)
        self.add(key, *(own / other for own, other in pairs if other))


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure, and what its goals would take if they are missed."""

    name: str
    title: str
    goals: tuple[Goal, ...]
    run: Callable[[Stage, Found], Coroutine[Any, Any, None]]
    takes: str = ""
    is_long: bool = False  # runs only when it is named


def summary(samples: Iterable[float]) -> dict[str, Any]:
    """Return the median, the quartiles and the number of some samples."""
    values = sorted(samples)
    if len(values) < 2:
        lower = middle = upper = values[0]
    else:
        lower, middle, upper = statistics.quantiles(values, method="inclusive")
    return {"median": middle, "lower": lower, "upper": upper, "samples": len(values)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measure with what it has found, ready to be stored as JSON."""

    measure: Measure
    found: Found
    took_s: float
    failure: str = ""

    def as_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "name": self.measure.name,
            "title": self.measure.title,
            "took_s": round(self.took_s, 1),
            "failure": self.failure,
            "takes": self.measure.takes,
            "notes": found.notes,
            "goals": [
                _goal(goal, found.samples[goal.key])
                for goal in self.measure.goals
                if found.samples.get(goal.key)
            ],
            "sides": {
                name: {figure: summary(values) for figure, values in figures.items() if values}
                for name, figures in found.sides.items()
            },
        }


def _goal(goal: Goal, samples: Samples) -> dict[str, Any]:
    known = summary(samples)
    return {
        "key": goal.key,
        "text": goal.text,
        "unit": goal.unit,
        "target": goal.target,
        "is_met": goal.is_met(known["median"]),
        **known,
    }
