"""The log of a writer as a state machine, driven event by event by a scenario file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.errors import Fenced, ShaleError, Stopping, StoreBroken
from shalekv.protocol.fencing import Occupant, WriterId
from shalekv.protocol.log import (
    Abandon,
    Acknowledge,
    Advance,
    Close,
    Fail,
    FailQueue,
    FlushPolicy,
    GroupTaken,
    Land,
    LogEffect,
    LogEvent,
    LogState,
    Outcome,
    Refuse,
    Requeue,
    SlotFilled,
    Stop,
    UploadFailed,
    step,
)
from tests.scenarios.reading import Scenario, scenarios_in

SCENARIOS = [s for s in scenarios_in(Path(__file__).parent) if s.file == "log.txt"]
OWN, OTHER = WriterId(5, b"o" * 16), b"r" * 16
NEW = LogState(
    OWN,
    FlushPolicy(max_parallel_writes=2, interval_ms=0, flush_bytes=1),
    is_ordered=False,
    next_wal_id=10,
)
FRONTS = {  # writes, depends on the state before it, is a load
    "data": (True, False, False),
    "a dependent": (True, True, False),
    "a load": (True, True, True),
    "nothing": (False, True, False),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=repr)
def test_log(scenario: Scenario) -> None:
    """Each event has the effects that its line names, and each question its answer."""
    state = NEW
    for line in scenario.steps:
        given, expected = (part.strip() for part in line.text.split("->"))
        if given == "in order":
            state = replace(state, is_ordered=True)
        elif (answer := answer_of(state, given)) is not None:
            assert answer == expected, line
        else:
            state, effects = step(state, event_of(given))
            assert ", ".join(map(described, effects)) == expected.replace("nothing", ""), line


def answer_of(state: LogState, question: str) -> str | None:
    """The answer to a line that asks for the state; None: it is an event."""
    match question.partition(" ")[0], question:
        case "mode", _:
            return state.mode.name.lower()
        case "next", _:
            return str(state.next_wal_id)
        case "may", "may share with a dependent":
            return "yes" if state.takes_dependents else "no"
        case "may", _:
            writes, depends, is_load = FRONTS[question.removeprefix("may take ")]
            may = state.may_take(writes=writes, depends_on_state=depends, is_load=is_load)
            return "yes" if may else "no"
    return None


def event_of(text: str) -> LogEvent:
    """The event that the left side of a line names."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    match text.partition(" ")[0]:
        case "take":
            return GroupTaken(numbers[0], numbers[1], is_load="a load" in text, now_ms=0.0)
        case "filled":
            return SlotFilled(numbers[0], occupant_of(text.partition(" by ")[2]))
        case "failed":
            return UploadFailed(numbers[0], StoreBroken("file:///", "create", "wal/1", "no disk"))
        case "close":
            return Close(Stopping("closed"))
        case "stop":
            return Stop(Fenced("fenced", own_epoch=5, newer_epoch=6))
        case "abandon":
            return Abandon()
    raise AssertionError(text)


def occupant_of(text: str) -> Occupant | None:
    if text == "us":
        return None
    epoch = int(text.rsplit(maxsplit=1)[-1])
    return Occupant(WriterId(epoch, OTHER), is_fence=text.startswith("a fence"))


def described(effect: LogEffect) -> str:
    """The effect as the right side of a line names it."""
    match effect:
        case Land(slot):
            return f"land {slot.position}"
        case Advance(slot):
            if slot.outcome is Outcome.LANDED:
                return f"advance to {slot.last_seq} in {slot.wal_id}"
            return f"advance past {slot.wal_id}"
        case Acknowledge(slot):
            return f"acknowledge {slot.position}"
        case Requeue(slot):
            return f"requeue {slot.position}"
        case Fail(slot, error):
            return f"fail {slot.position} {name_of(error)}"
        case Refuse(error):
            return f"refuse {type(error).__name__}"
        case FailQueue():
            return "fail the queue"


def name_of(error: ShaleError | None) -> str:
    return "as unknown" if error is None else f"by {type(error).__name__}"
