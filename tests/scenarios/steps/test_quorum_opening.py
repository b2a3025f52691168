"""The opening with safekeepers as a state machine, driven event by event by a scenario file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.errors import NotAMember, QuorumUnavailable
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.opening import (
    EpochClaimed,
    FinishOpening,
    ListWal,
    ManifestRead,
)
from shalekv.protocol.quorum.opening import (
    ClaimEpoch,
    CommitFence,
    FenceCommitted,
    FetchedTail,
    FetchFailed,
    FetchTail,
    GatherVotes,
    GreetMembers,
    ListArchive,
    MembersGreeted,
    PollFailed,
    QuorumEffect,
    QuorumEvent,
    QuorumOpening,
    QuorumPhase,
    TailFetched,
    VotesGathered,
    step,
)
from shalekv.protocol.quorum_records import (
    Ballot,
    EpochSection,
    Greeting,
    LogEnd,
    LogHealth,
    LogShape,
    Record,
    Vote,
)
from tests.scenarios.reading import Scenario, scenarios_in
from tests.scenarios.steps import notation
from tests.scenarios.steps.notation import OTHER, OWN, lines_of
from tests.unit.protocol.logs import ids, members

SCENARIOS = [s for s in scenarios_in(Path(__file__).parent) if s.file == "quorum_opening.txt"]
MANIFEST = Manifest(
    database_id=b"d" * 16,
    manifest_id=7,
    write_id=b"w" * 16,
    writer_epoch=4,
    writer_nonce=OTHER,
    wal_mode=WalMode.QUORUM,
    wal_generation=1,
    wal_members=tuple(map(str, members("ABC"))),
)
SIMPLE_EVENTS: Mapping[str, QuorumEvent] = {
    "a majority has lost its logs": PollFailed(NotAMember("a majority has lost its logs")),
    "no majority has answered": PollFailed(QuorumUnavailable("no majority has answered")),
    "not fetched": FetchFailed(),
    "committed": FenceCommitted(),
}
UNCLAIMED = (QuorumPhase.START, QuorumPhase.REREAD)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=repr)
def test_quorum_opening(scenario: Scenario) -> None:
    """Each event has the effect that its line names, or raises the error that it names."""
    state, first_listed = QuorumOpening(OWN.nonce), 0
    for line in lines_of(scenario):
        with line.outcome() as outcome:
            state, effects = step(state, event_of(line.given, state, first_listed))
            outcome.text = described(*effects)
            for effect in effects:
                if isinstance(effect, ListWal | ListArchive):
                    first_listed = effect.first


def event_of(text: str, state: QuorumOpening, first_listed: int) -> QuorumEvent:
    """Return the event that the left side of a line describes."""
    what, _, rest = text.partition(" ")
    match what.rstrip(","):
        case "manifest":
            return ManifestRead(manifest_of(text, is_claimed=state.phase not in UNCLAIMED))
        case "greeted":
            promises = [int(epoch) for epoch in rest.removeprefix("promised ").split()]
            return MembersGreeted(dict(zip(ids("ABC"), map(greeting_of, promises), strict=False)))
        case "claimed":
            return EpochClaimed(manifest_of(text, is_claimed=True))
        case "voted":
            return VotesGathered(votes_of(text))
        case "fetched":
            return TailFetched(tail_of(rest.removeprefix("up to "), state.tip))
    return SIMPLE_EVENTS.get(text) or notation.event_of(text, first_listed)


def manifest_of(text: str, *, is_claimed: bool) -> Manifest:
    numbers = {name: int(value) for name, value in re.findall(r"(c|generation) (\d+)", text)}
    following = re.search(r"next ([A-Z ]+)", text)
    epoch = re.search(r"of epoch (\d+)", text)
    left_out = re.search(r"left out (\d+) to (\d+)", text)
    manifest = replace(
        MANIFEST,
        wal_id_last_compacted=numbers.get("c"),
        wal_generation=numbers.get("generation", 1),
        wal_members_next=tuple(map(str, members(following[1].replace(" ", ""))))
        if following
        else (),
        wal_ids_left_out=(range(int(left_out[1]), int(left_out[2]) + 1),) if left_out else (),
    )
    if is_claimed:
        manifest = replace(manifest, writer_epoch=OWN.epoch, writer_nonce=OWN.nonce)
    if epoch:
        manifest = replace(manifest, writer_epoch=int(epoch[1]), writer_nonce=OTHER)
    if "without members" in text:
        manifest = replace(manifest, wal_mode=WalMode.OBJECT_STORE, wal_members=())
    return manifest


def greeting_of(promise: int) -> Greeting:
    return Greeting(b"", Ballot(promise, OTHER), LogShape(), 0, LogHealth.SOUND)


def votes_of(text: str) -> dict[bytes, Vote]:
    head, _, rest = text.partition(", ")
    words = rest.split()
    epoch = int(head.removeprefix("voted for epoch ")) if " " in head else OWN.epoch
    return {
        ids(name)[0]: Vote(Ballot(epoch, OWN.nonce), log_of(end), 0)
        for name, end in zip(words[::2], words[1::2], strict=True)
    }


def end_of(text: str) -> LogEnd:
    """The last record of a log, as epoch/lsn/object."""
    epoch, lsn, wal_id = map(int, text.split("/"))
    return LogEnd(lsn, epoch, checksum=1_000 * epoch + lsn, wal_id=wal_id)


def log_of(text: str) -> LogShape:
    return LogShape() if text == "-" else LogShape(sections=(EpochSection(1, end_of(text)),))


def tail_of(text: str, tip: int | None) -> FetchedTail:
    if text == "nothing":
        return FetchedTail(tip, LogEnd(), ())
    last = end_of(text)
    assert last.wal_id is not None
    if tip is not None and last.wal_id <= tip:
        return FetchedTail(tip, last, ())
    base = LogEnd(last.lsn - 1, last.epoch, last.checksum - 1, last.wal_id - 1)
    record = Record(
        last.lsn, last.epoch, last.wal_id, last.ends_object, base.checksum, last.checksum
    )
    return FetchedTail(tip, base, (record,))


def described(*effects: QuorumEffect) -> str:
    """Describe the effects like the right side of a line."""
    match effects:
        case [GreetMembers(configuration)]:
            return f"greet {' '.join(each.address[0] for each in configuration.everyone)}"
        case [ClaimEpoch(epoch_min)]:
            return f"claim epoch {epoch_min} or a higher one"
        case [GatherVotes(configuration, ballot)]:
            asked = " ".join(each.address[0] for each in configuration.everyone)
            assert ballot == Ballot(OWN.epoch, OWN.nonce)
            return f"ask {asked} for votes of epoch {ballot.epoch}"
        case [ListArchive(first)]:
            return f"list the archive from {first}"
        case [FetchTail(member, _, tip)]:
            behind = "all from" if tip is None else f"what is behind object {tip} from"
            return f"fetch {behind} {member.address[0]}"
        case [CommitFence(leader, tail, wal_id)]:
            assert leader.log.base == tail.base
            assert leader.first_own_lsn == tail.last.lsn + 1
            return f"commit a fence in object {wal_id}"
        case [FinishOpening(first_seq, last_wal_id)]:
            last = "none" if last_wal_id is None else last_wal_id
            return f"finish, first number {first_seq}, last object {last}"
        case []:
            return "serve"
    return notation.described(*effects)
