"""Reads scenario files: from text to steps. README.md describes the notation."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from tests.scenarios.stage import Stage

_HEADING = "scenario: "
_COMMENT = re.compile(r"(^|\s)#.*")
_ROWS = (
    re.compile(r"time +\d+, "),  # outcome of a create in the WAL
    re.compile(r"[a-z]+( \d+)? -> Write "),  # outcome of a create of a manifest
    re.compile(r"\d{20}\.sst, "),  # contents of a slot of the WAL
    re.compile(r"(manifest|wal|levels)/\S+ +(stays|goes)"),  # fate of an object
    re.compile(r"record of \S+ +(stays|goes)"),  # fate of a record
    re.compile(r"(record of )?(manifest|wal)/\S+ +(source )?of "),  # two-phase: all that is there
    re.compile(r"levels/\d+\.sst, "),  # contents of an object of the levels
)


@dataclass(frozen=True, slots=True)
class Step:
    """One sentence, or the rows of one table."""

    line: int
    text: str  # of a table: its first row
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Scenario:
    """One worked example."""

    file: str
    title: str
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        return f"{self.file.removesuffix('.txt')}: {self.title}"


def scenarios_in(folder: Path) -> list[Scenario]:
    """The scenarios of all files in `folder`, by file and place."""
    files = sorted(folder.glob("*.txt"))
    return [scenario for file in files for scenario in parse(file.name, file.read_text("utf-8"))]


def parse(file: str, text: str) -> Iterator[Scenario]:
    """Return the scenarios of one file.

    Raises `ValueError` for a step before the first heading, and for a heading without steps.
    """
    title = ""
    lines: list[tuple[int, str]] = []
    for number, raw in enumerate([*text.splitlines(), _HEADING], 1):
        line = _COMMENT.sub("", raw).strip()
        if raw.startswith(_HEADING):
            if bool(title) != bool(lines):
                raise ValueError(f"{file}:{number}: a scenario has a heading and steps")
            if title:
                yield Scenario(file, title, tuple(_steps(lines)))
            title, lines = raw.removeprefix(_HEADING).strip(), []
        elif line:
            lines.append((number, line))


def _steps(lines: list[tuple[int, str]]) -> Iterator[Step]:
    """Rows of one kind that follow each other are one step."""
    for kind, group in groupby(lines, key=lambda line: _kind(line[1])):
        found = list(group)
        if kind is None:
            yield from (Step(number, text) for number, text in found)
        else:
            rows = tuple(" ".join(text.split()) for _, text in found)
            yield Step(found[0][0], rows[0], rows)


def _kind(text: str) -> int | None:
    """The kind of table that a line is a row of."""
    kinds = (kind for kind, pattern in enumerate(_ROWS) if pattern.match(text))
    return next(kinds, None)


Act = Callable[..., Awaitable[None]]
ActT = TypeVar("ActT", bound=Act)

_SENTENCES: list[tuple[re.Pattern[str], Act]] = []
_TABLES: list[tuple[re.Pattern[str], Act]] = []


def sentence(pattern: str) -> Callable[[ActT], ActT]:
    """The function carries out sentences that match; the groups are its keyword arguments."""

    def register(act: ActT) -> ActT:
        _SENTENCES.append((re.compile(pattern), act))
        return act

    return register


def table(pattern: str) -> Callable[[ActT], ActT]:
    """The function is given the rows of tables whose first row begins like this."""

    def register(act: ActT) -> ActT:
        _TABLES.append((re.compile(pattern), act))
        return act

    return register


async def carry_out(stage: Stage, scenario: Scenario) -> None:
    """Carry out all steps; an error names its line. A millisecond passes after each."""
    for step in scenario.steps:
        try:
            await _step(stage, step)
            await stage.sim.sleep_ms(1)
        except BaseException as error:
            error.add_note(f"tests/scenarios/{scenario.file}:{step.line}: {step.text}")
            raise
    if stage.faults:  # senders without a reply may give up while their request is under way
        await stage.sim.sleep_ms(1_000)
    stage.check_all_is_resolved()


async def _step(stage: Stage, step: Step) -> None:
    stage.sim.note(step.text)
    if step.rows:
        (act,) = [act for pattern, act in _TABLES if pattern.match(step.text)]
        await act(stage, list(step.rows))
        return
    await carry_out_sentence(stage, step.text)


async def carry_out_sentence(stage: Stage, text: str) -> None:
    found = [(act, m) for pattern, act in _SENTENCES if (m := pattern.fullmatch(text))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} meanings: {text}")
    act, match = found[0]
    await act(stage, **match.groupdict())
