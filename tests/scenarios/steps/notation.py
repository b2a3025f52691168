"""Notation of scenarios that drive a state machine: an event, an arrow, and its effect or error.

Events and effects that both openings have are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shalekv.errors import ShaleError
from shalekv.protocol.fencing import Occupant, WalListing, WriterId
from shalekv.protocol.opening import (
    CreateFence,
    FenceCreated,
    ListWal,
    LogReplayed,
    ReadManifest,
    ReplayLog,
    WalListed,
)
from tests.scenarios.reading import Scenario

OWN, OTHER = WriterId(5, b"o" * 16), b"r" * 16


@dataclass(slots=True)
class Outcome:
    """The effects of an event, in words."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """An event, and the effects or the error that must follow."""

    given: str
    expected: str

    @contextmanager
    def outcome(self) -> Iterator[Outcome]:
        """Compare the outcome that the block sets, or the error that it raises."""
        outcome, raised = Outcome(), None
        try:
            yield outcome
        except ShaleError as error:
            raised = error
        if raised is None:
            assert outcome.text == self.expected, self
            return
        kind, _, text = self.expected.partition(": ")
        assert (kind, text in str(raised)) == (type(raised).__name__, True), (self, raised)


def lines_of(scenario: Scenario) -> Iterator[Line]:
    for step in scenario.steps:
        given, _, expected = step.text.partition("->")
        yield Line(given.strip(), expected.strip())


def slots_of(text: str) -> list[int]:
    if text == "nothing":
        return []
    first, to, last = text.partition(" to ")
    return list(range(int(first), int(last) + 1)) if to else [int(slot) for slot in text.split()]


def occupant_of(text: str) -> Occupant:
    if text == "our fence":
        return Occupant(OWN, is_fence=True)
    epoch = int(text.rsplit(maxsplit=1)[-1])
    return Occupant(WriterId(epoch, OTHER), is_fence=text.startswith("a fence"))


def event_of(text: str, first_listed: int) -> WalListed | FenceCreated | LogReplayed:
    """An event that both openings have, from the left side of a line."""
    what, _, rest = text.partition(" ")
    match what:
        case "listed":
            return WalListed(WalListing(first_listed, frozenset(slots_of(rest))))
        case "created":
            return FenceCreated(None)
        case "found":
            return FenceCreated(occupant_of(rest))
        case "replayed":
            return LogReplayed(int(rest.removeprefix("up to ")))
    raise AssertionError(text)


def described(effect: object) -> str:
    """Describe an effect that both openings have, like the right side of a line."""
    match effect:
        case ReadManifest():
            return "read the manifest"
        case ListWal(first):
            return f"list the WAL from {first}"
        case CreateFence(slot):
            return f"create a fence in {slot}"
        case ReplayLog(slots):
            return f"replay {slots.start} to {slots.stop - 1}" if slots else "replay nothing"
    raise AssertionError(effect)
