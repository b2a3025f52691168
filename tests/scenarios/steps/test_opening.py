"""The opening as a state machine, driven event by event by a scenario file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.errors import ShaleError
from shalekv.protocol.fencing import Occupant, WalListing, WriterId
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.opening import (
    CreateFence,
    EpochClaimed,
    FenceCreated,
    FenceUnknown,
    FillSlots,
    FinishOpening,
    ListWal,
    LogReplayed,
    ManifestRead,
    Opening,
    OpeningEffect,
    OpeningEvent,
    ReadManifest,
    ReplayLog,
    ReserveWidth,
    SlotsFilled,
    WalListed,
    step,
)
from tests.scenarios.reading import Scenario, scenarios_in

SCENARIOS = [s for s in scenarios_in(Path(__file__).parent) if s.file == "opening.txt"]
OWN, OTHER = WriterId(5, b"o" * 16), b"r" * 16
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
    for line in scenario.steps:
        given, expected = (part.strip() for part in line.text.split("->"))
        raised: ShaleError | None = None
        effects: Sequence[OpeningEffect] = ()
        try:
            state, effects = step(state, event_of(given, first_listed))
        except ShaleError as error:
            raised = error
        if raised is not None:
            kind, _, text = expected.partition(": ")
            assert (kind, text in str(raised)) == (type(raised).__name__, True), (line, raised)
        else:
            assert described(*effects) == expected, line
        for effect in effects:
            first_listed = effect.first if isinstance(effect, ListWal) else first_listed


def event_of(text: str, first_listed: int) -> OpeningEvent:
    """The event that the left side of a line tells of."""
    what, _, rest = text.partition(" ")
    match what.rstrip(","):
        case "claimed":
            return EpochClaimed(manifest_of(text))
        case "manifest":
            return ManifestRead(manifest_of(text))
        case "listed":
            return WalListed(WalListing(first_listed, frozenset(slots_of(rest))))
        case "created":
            return FenceCreated(None)
        case "found":
            return FenceCreated(occupant_of(rest))
        case "unknown":
            return FenceUnknown()
        case "filled":
            by = [(int(slot), f"data of {who}") for slot, who in re.findall(r"(\d+) by (.*)", rest)]
            return SlotsFilled([(slot, occupant_of(who)) for slot, who in by])
        case "replayed":
            return LogReplayed(int(rest.removeprefix("up to ")))
    raise AssertionError(text)


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


def described(*effects: OpeningEffect) -> str:
    """The effects as the right side of a line tells of them."""
    match effects:
        case [ReadManifest()]:
            return "read the manifest"
        case [ListWal(first)]:
            return f"list the WAL from {first}"
        case [CreateFence(slot)]:
            return f"create a fence in {slot}"
        case [ReserveWidth(width)]:
            return f"widen the manifest to {width}"
        case [FillSlots(slots)]:
            return f"fill {' '.join(map(str, slots))}"
        case [ReplayLog(slots)]:
            return f"replay {slots.start} to {slots.stop - 1}" if slots else "replay nothing"
        case [FinishOpening(first_seq, last_wal_id)]:
            return f"finish, first number {first_seq}, last slot {last_wal_id}"
        case []:
            return "serve"
    raise AssertionError(effects)
