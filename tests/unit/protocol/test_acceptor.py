"""Tests of the acceptor: its replies to each message, and what must be durable before them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.protocol.quorum.acceptor import (
    AcceptorState,
    CommittedUpTo,
    Flush,
    Reply,
    Save,
    Step,
    Write,
    archive_notification,
    archived,
    damaged,
    disconnected,
    flushed,
    has_taken,
    overtaken,
    step,
    step_relayed,
)
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Archived,
    Ballot,
    Elected,
    Greet,
    LogHealth,
    Refusal,
    ToProposer,
    VoteRequest,
)
from tests.unit.protocol.logs import ME, TWIN, ballot, kinds, log, records, state

STREAM = 7


def reply(effects: object) -> ToProposer:
    assert isinstance(effects, list)
    (found,) = [effect for effect in effects if isinstance(effect, Reply)]
    assert found.stream == STREAM
    return found.message


def follow(before: AcceptorState, epoch: int, epochs: str, *, trimmed: int = 0) -> Step:
    return step(before, STREAM, Elected(ME, ballot(epoch), log(epochs, trimmed=trimmed)))


def followed(epochs: str, elected: str, epoch: int = 2, *, committed_lsn: int = 0) -> AcceptorState:
    """Return a member with the log `epochs` that follows a leader with the log `elected`."""
    return follow(state(epochs, committed_lsn=committed_lsn), epoch, elected)[0]


def test_an_older_stream_is_not_followed() -> None:
    """CE10: only the stream that was opened last counts, even after it has ended."""
    before, _ = step(state("1"), 9, Elected(ME, ballot(2), log("1")))
    after, effects = follow(before, 2, "1")
    assert after == before
    assert reply(effects) == Refusal(ballot(2), "another stream was elected since")
    assert follow(disconnected(before, 9), 2, "1")[1] == effects
    assert follow(disconnected(before, 9), 3, "1")[0].leader == STREAM
    assert disconnected(before, 8) == before


def test_an_older_stream_does_not_fill_a_damaged_member() -> None:
    """CE10: an older stream was elected with a log that lacks records acknowledged on the newer."""
    before, _ = step(state("1"), 9, Elected(ME, ballot(2), log("1")))
    before, _ = step(before, 9, Append(ballot(2), tuple(records("12")), 0))
    lost = disconnected(damaged(before)[0], 9)
    after, effects = follow(lost, 2, "1")
    assert after == lost
    assert reply(effects) == Refusal(ballot(2), "another stream was elected since")
    again, _ = step(lost, 10, Elected(ME, ballot(2), log("12")))
    assert (again.health, again.sound_from_lsn) == (LogHealth.REFILLING, 2)


@pytest.mark.parametrize(
    ("mine", "committed_lsn", "trimmed"), [("1111", 3, 0), ("1111", 4, 4), ("1", 1, 0)]
)
def test_what_was_committed_is_not_cut(mine: str, committed_lsn: int, trimmed: int) -> None:
    """CE13: an elected log without committed records is refused: a majority has lost records."""
    before = replace(state(mine, committed_lsn=committed_lsn), log=log(mine, trimmed=trimmed))
    after, effects = follow(before, 3, "" if mine == "1" else "1122")
    answer = reply(effects)
    assert after == before
    assert isinstance(answer, Refusal)
    assert "was committed, and is not in the elected log" in answer.problem


def test_a_flush_of_what_was_cut_makes_nobody_sound() -> None:
    """A flush of records that were truncated meanwhile does not make a refilled member sound."""
    filling = replace(state("111"), health=LogHealth.REFILLING)
    after, _ = follow(filling, 3, "12")
    assert flushed(after, 3)[0].health is LogHealth.REFILLING


@pytest.mark.parametrize("sent", ["13", "33"])
def test_records_of_another_log_are_refused(sent: str) -> None:
    """CE11: records must follow the end of the log, and be of no later epoch than the leader."""
    before = followed("1", "1")
    after, effects = step(before, STREAM, Append(ballot(2), tuple(records(sent)[1:]), 0))
    assert after == before
    assert isinstance(reply(effects), Refusal)


@pytest.mark.parametrize(("first", "has_space"), [(1, False), (2, True)])
def test_records_without_space_or_behind_them_are_not_taken(first: int, *, has_space: bool) -> None:
    """The reply says where the log ends, and the commit point is accepted all the same."""
    before = followed("1", "1")
    message = Append(ballot(2), tuple(records("122")[first:]), 1)
    after, effects = step(before, STREAM, message, has_space=has_space)
    assert after.log == log("1")
    assert reply(effects) == Appended(ballot(2), 1, is_full=True)
    assert CommittedUpTo(1) in effects


def test_archived_records_are_trimmed_and_reported() -> None:
    """Archived records are trimmed and reported, and a late list does not move either back."""
    before = followed("122", "122", committed_lsn=1)
    after = archived(before, 1, log("12").last)
    assert after.log == log("122", trimmed=2)
    assert archived(after, 0, log("1").last) == after
    _, effects = step(after, STREAM, Append(ballot(2), tuple(records("122")), 0))
    assert reply(effects) == Appended(ballot(2), 3, archived_wal_id=1)


def test_a_superseded_leader_is_refused() -> None:
    """A leader gets a refusal when a promise was given to another writer, and only then."""
    led = followed("1", "1")
    assert overtaken(led, step(led, STREAM + 1, Greet())[0]) is None
    assert overtaken(led, step(led, STREAM + 1, VoteRequest(ME, ballot(1)))[0]) is None
    assert overtaken(led, followed("1", "1")) is None
    after, _ = step(led, STREAM + 1, VoteRequest(ME, ballot(3)))
    found = overtaken(led, after)
    assert found is not None
    assert (found[0], found[1].promise) == (STREAM, ballot(3))
    assert overtaken(after, step(after, STREAM + 1, VoteRequest(ME, ballot(4)))[0]) is None


def test_damage_while_it_runs() -> None:
    """A damaged log accepts nothing until the leader is elected here again and has reset it."""
    led = followed("11", "11", committed_lsn=1)
    after, effects = damaged(led)
    assert kinds(effects) == ["Save", "Reply"]
    assert effects[0] == Save(led.promise, LogHealth.DAMAGED)
    assert isinstance(reply(effects), Refusal)
    next_one = records("1", led.log.last)
    again, effects = step(after, STREAM, Append(led.promise, tuple(next_one), 2))
    assert (again, kinds(effects)) == (after, ["Reply"])
    refilled, effects = step(after, STREAM + 1, Elected(ME, led.promise, log("11")))
    assert kinds(effects)[:2] == ["Reset", "Save"]
    assert (refilled.health, refilled.sound_from_lsn) == (LogHealth.REFILLING, 2)
    assert kinds(damaged(disconnected(led, STREAM))[1]) == ["Save"]


def test_records_are_acknowledged_to_the_writer() -> None:
    """Relayed records are handled as if they had come on the writer's stream; it gets the reply."""
    new = tuple(records("122")[1:])
    message = Append(ballot(2), new, 3)
    relayed = step_relayed(followed("1", "1"), message)
    assert relayed == step(followed("1", "1"), STREAM, message)
    assert relayed is not None
    expected = [Write(new), Flush(), Reply(STREAM, Appended(ballot(2), 3)), CommittedUpTo(3)]
    assert relayed[1] == expected


def test_the_two_ways_may_bring_records_in_any_order() -> None:
    """Known records that come relayed get no reply; of an overlap only new records are written."""
    before = followed("1", "1")
    first, second, third = records("1222")[1:]
    direct, _ = step(before, STREAM, Append(ballot(2), (first, second), 0))
    assert step_relayed(direct, Append(ballot(2), (first,), 0)) == (direct, [])
    relayed = step_relayed(direct, Append(ballot(2), (second, third), 2))
    assert relayed is not None
    after, effects = relayed
    assert after.log == log("1222")
    assert Write((third,)) in effects
    again, effects = step(after, STREAM, Append(ballot(2), (third,), 0))
    assert again == after
    assert effects == [Flush(), Reply(STREAM, Appended(ballot(2), 4))]


@pytest.mark.parametrize("other", [ballot(1), ballot(3), ballot(2, TWIN)])
def test_another_writer_is_not_followed(other: Ballot) -> None:
    """Relayed records of any writer but the elected one are dropped (CE10, CE14)."""
    new = tuple(records("11")[1:])
    assert step_relayed(followed("1", "1"), Append(other, new, 2)) is None


def test_nothing_counts_without_the_stream_of_the_writer() -> None:
    """Without an elected stream even a relayed commit point is dropped (CE12)."""
    cut_off = disconnected(followed("11", "11"), STREAM)
    assert step_relayed(cut_off, Append(ballot(2), (), 2)) is None
    voted, _ = step(followed("11", "11"), 9, VoteRequest(ME, ballot(3)))
    assert step_relayed(voted, Append(ballot(2), (), 2)) is None
    assert step_relayed(voted, Append(ballot(3), (), 2)) is None


def test_only_what_was_taken_is_passed_on() -> None:
    """An append that was refused, or for which there was no space, counts as not taken."""
    new = Append(ballot(2), tuple(records("12")[1:]), 0)
    taken, _ = step(followed("1", "1"), STREAM, new)
    assert has_taken(taken, STREAM, new)
    assert not has_taken(taken, STREAM - 1, new)
    assert not has_taken(taken, STREAM, Append(ballot(1), (), 0))
    full, _ = step(followed("1", "1"), STREAM, new, has_space=False)
    assert not has_taken(full, STREAM, new)


def test_archive_progress_is_reported_once() -> None:
    """Archive progress is reported to the writer that is followed, and each step only once."""
    before = followed("11", "11")
    assert archive_notification(before, STREAM, None) is None
    after = archived(before, 0, log("1").last)
    assert archive_notification(after, STREAM, None) == Archived(ballot(2), 0)
    assert archive_notification(after, STREAM, 0) is None
    assert archive_notification(after, STREAM - 1, None) is None
