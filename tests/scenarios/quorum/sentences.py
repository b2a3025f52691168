"""The sentences of quorum scenarios, and what carries them out. README.md lists them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from tests.scenarios.quorum.stage import Stage
from tests.scenarios.reading import Scenario

Act = Callable[..., None]
ActT = TypeVar("ActT", bound=Act)

SENTENCES: list[tuple[re.Pattern[str], Act]] = []
NODES = r"(?P<nodes>[A-F](?: [A-F])*)"
NODE = r"(?P<node>[A-F])"
WRITER = r"writer (?P<writer>\d)"


def sentence(pattern: str) -> Callable[[ActT], ActT]:
    """The function carries out sentences that match; the groups are its keyword arguments."""

    def register(act: ActT) -> ActT:
        SENTENCES.append((re.compile(pattern), act))
        return act

    return register


def play(scenario: Scenario) -> None:
    """Carry out all steps; what is raised tells the line."""
    stage = Stage()
    for step in scenario.steps:
        try:
            _carry_out(stage, step.text)
        except BaseException as error:
            error.add_note(f"tests/scenarios/quorum/{scenario.file}:{step.line}: {step.text}")
            raise


def _carry_out(stage: Stage, text: str) -> None:
    found = [(act, match) for pattern, act in SENTENCES if (match := pattern.fullmatch(text))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} meanings: {text}")
    act, match = found[0]
    act(stage, **match.groupdict())
