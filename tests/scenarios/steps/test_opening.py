"""The opening as a state machine, driven event by event by a scenario file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.protocol.manifest import Manifest
from shalekv.protocol.opening import (
    EpochClaimed,
    FenceUnknown,
    FillSlots,
    FinishOpening,
    ListWal,
    ManifestRead,
    Opening,
    OpeningEffect,
    OpeningEvent,
    ReserveWidth,
    SlotsFilled,
    step,
)
from tests.scenarios.reading import Scenario, scenarios_in
from tests.scenarios.steps import notation
from tests.scenarios.steps.notation import OWN, lines_of, occupant_of

SCENARIOS = [s for s in scenarios_in(Path(__file__).parent) if s.file == "opening.txt"]
MANIFEST = Manifest(
    database_id=b"d" * 16,
    manifest_id=7,
    write_id=b"w" * 16,
    writer_epoch=OWN.epoch,
    writer_nonce=OWN.nonce,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=repr)
def test_opening(scenario: Scenario) -> None:
    """Each event has the effect that its line names, or raises the error that it names."""
    state, first_listed = Opening(OWN.nonce), 0
    for line in lines_of(scenario):
        with line.outcome() as outcome:
            state, effects = step(state, event_of(line.given, first_listed))
            outcome.text = described(*effects)
            for effect in effects:
                first_listed = effect.first if isinstance(effect, ListWal) else first_listed


def event_of(text: str, first_listed: int) -> OpeningEvent:
    """Return the event that the left side of a line describes."""
    what, _, rest = text.partition(" ")
    match what.rstrip(","):
        case "claimed":
            return EpochClaimed(manifest_of(text))
        case "manifest":
            return ManifestRead(manifest_of(text))
        case "unknown":
            return FenceUnknown()
        case "filled":
            by = [(int(slot), f"data of {who}") for slot, who in re.findall(r"(\d+) by (.*)", rest)]
            return SlotsFilled([(slot, occupant_of(who)) for slot, who in by])
    return notation.event_of(text, first_listed)


def manifest_of(text: str) -> Manifest:
    epoch = re.search(r"of epoch (\d+)", text)
    numbers = {name: int(value) for name, value in re.findall(r"(width|c|seen) (\d+)", text)}
    manifest = replace(
        MANIFEST,
        fence_width=numbers.get("width", 1),
        wal_id_last_compacted=numbers.get("c"),
        wal_id_last_seen=numbers.get("seen"),
    )
    return replace(manifest, writer_epoch=int(epoch[1])) if epoch else manifest


def described(*effects: OpeningEffect) -> str:
    """Describe the effects like the right side of a line."""
    match effects:
        case [ReserveWidth(width)]:
            return f"widen the manifest to {width}"
        case [FillSlots(slots)]:
            return f"fill {' '.join(map(str, slots))}"
        case [FinishOpening(first_seq, last_wal_id)]:
            return f"finish, first number {first_seq}, last slot {last_wal_id}"
        case []:
            return "serve"
    return notation.described(*effects)
