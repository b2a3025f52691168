"""The sentences of scenario files: what each looks like, and the coroutine that carries it out."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.scenarios.reading import Scenario, Step
from tests.scenarios.stage import Stage

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
    """Carry out all steps; what is raised tells the line. A millisecond passes after each."""
    for step in scenario.steps:
        try:
            await _step(stage, step)
            await stage.world.sleep_ms(1)
        except BaseException as error:
            error.add_note(f"tests/scenarios/{scenario.file}:{step.line}: {step.text}")
            raise
    if stage.faults:  # who hears nothing may give up while its request is under way
        await stage.world.sleep_ms(1_000)
    stage.check_all_is_told()


async def _step(stage: Stage, step: Step) -> None:
    stage.world.note(step.text)
    if step.rows:
        (act,) = [act for pattern, act in _TABLES if pattern.match(step.text)]
        await act(stage, list(step.rows))
        return
    await carry_out_sentence(stage, step.text)


async def carry_out_sentence(stage: Stage, text: str) -> None:
    """Do what one sentence says."""
    found = [(act, m) for pattern, act in _SENTENCES if (m := pattern.fullmatch(text))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} meanings: {text}")
    act, match = found[0]
    await act(stage, **match.groupdict())
