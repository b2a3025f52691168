"""The acceptor, message by message: what it answers, and what must be durable before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.protocol.acceptor import (
    AcceptorState,
    CommittedUpTo,
    Flush,
    Reply,
    Save,
    Step,
    Write,
    archived,
    damaged,
    disconnected,
    flushed,
    has_taken,
    overtaken,
    step,
    step_relayed,
    tidings,
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
    """A member with a log that follows a leader with another."""
    return follow(state(epochs, committed_lsn=committed_lsn), epoch, elected)[0]


def test_an_older_stream_is_not_followed() -> None:
    """CE10: the stream that was opened last is the one that counts, also when it has ended."""
    before, _ = step(state("1"), 9, Elected(ME, ballot(2), log("1")))
    after, effects = follow(before, 2, "1")
    assert after == before
    assert reply(effects) == Refusal(ballot(2), "another stream was elected since")
    assert follow(disconnected(before, 9), 2, "1")[1] == effects
    assert follow(disconnected(before, 9), 3, "1")[0].leader == STREAM
    assert disconnected(before, 8) == before


def test_an_older_stream_does_not_fill_a_damaged_member() -> None:
    """CE10: it was elected with a log that ends before what was acknowledged on the newer one."""
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
    """CE13: an elected log without it means that a majority has lost records."""
    before = replace(state(mine, committed_lsn=committed_lsn), log=log(mine, trimmed=trimmed))
    after, effects = follow(before, 3, "" if mine == "1" else "1122")
    answer = reply(effects)
    assert after == before
    assert isinstance(answer, Refusal)
    assert "was committed, and is not in the elected log" in answer.problem


def test_a_flush_of_what_was_cut_makes_nobody_sound() -> None:
    """It may have been under way when the log was truncated."""
    filling = replace(state("111"), health=LogHealth.REFILLING)
    after, _ = follow(filling, 3, "12")
    assert flushed(after, 3)[0].health is LogHealth.REFILLING


@pytest.mark.parametrize("sent", ["13", "33"])
def test_records_of_another_log_are_refused(sent: str) -> None:
    """CE11: they must follow what is there, and be of no later epoch than the leader."""
    before = followed("1", "1")
    after, effects = step(before, STREAM, Append(ballot(2), tuple(records(sent)[1:]), 0))
    assert after == before
    assert isinstance(reply(effects), Refusal)


@pytest.mark.parametrize(("first", "has_room"), [(1, False), (2, True)])
def test_records_without_room_or_behind_them_are_not_taken(first: int, *, has_room: bool) -> None:
    """The leader is told where the log ends; the commit point is taken all the same."""
    before = followed("1", "1")
    message = Append(ballot(2), tuple(records("122")[first:]), 1)
    after, effects = step(before, STREAM, message, has_room=has_room)
    assert after.log == log("1")
    assert reply(effects) == Appended(ballot(2), 1, is_full=True)
    assert CommittedUpTo(1) in effects


def test_what_was_seen_in_the_archive_is_trimmed_and_told() -> None:
    """It does not go back when a list was slow."""
    before = followed("122", "122", committed_lsn=1)
    after = archived(before, 1, log("12").last)
    assert after.log == log("122", trimmed=2)
    assert archived(after, 0, log("1").last) == after
    _, effects = step(after, STREAM, Append(ballot(2), tuple(records("122")), 0))
    assert reply(effects) == Appended(ballot(2), 3, archived_wal_id=1)


def test_who_is_overtaken() -> None:
    """A leader is told of a promise that was given to another, and of nothing else."""
    led = followed("1", "1")
    assert overtaken(led, step(led, STREAM + 1, Greet())[0]) is None
    assert overtaken(led, step(led, STREAM + 1, VoteRequest(ME, ballot(1)))[0]) is None
    assert overtaken(led, followed("1", "1")) is None
    after, _ = step(led, STREAM + 1, VoteRequest(ME, ballot(3)))
    told = overtaken(led, after)
    assert told is not None
    assert (told[0], told[1].promise) == (STREAM, ballot(3))
    assert overtaken(after, step(after, STREAM + 1, VoteRequest(ME, ballot(4)))[0]) is None


def test_damage_while_it_runs() -> None:
    """A log that is found damaged is worth nothing until whoever leads is elected here again."""
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
    """They are written and flushed as if they had come on its stream, where the reply goes."""
    new = tuple(records("122")[1:])
    message = Append(ballot(2), new, 3)
    relayed = step_relayed(followed("1", "1"), message)
    assert relayed == step(followed("1", "1"), STREAM, message)
    assert relayed is not None
    expected = [Write(new), Flush(), Reply(STREAM, Appended(ballot(2), 3)), CommittedUpTo(3)]
    assert relayed[1] == expected


def test_the_two_ways_may_bring_records_in_any_order() -> None:
    """What has come already is not answered again; what overlaps is taken from where it is new."""
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
    """Neither an older one, nor a newer one that was not elected here, nor a twin (CE10, CE14)."""
    new = tuple(records("11")[1:])
    assert step_relayed(followed("1", "1"), Append(other, new, 2)) is None


def test_nothing_counts_without_the_stream_of_the_writer() -> None:
    """A member that has no leader drops even a commit point (CE12), as one that has voted does."""
    cut_off = disconnected(followed("11", "11"), STREAM)
    assert step_relayed(cut_off, Append(ballot(2), (), 2)) is None
    voted, _ = step(followed("11", "11"), 9, VoteRequest(ME, ballot(3)))
    assert step_relayed(voted, Append(ballot(2), (), 2)) is None
    assert step_relayed(voted, Append(ballot(3), (), 2)) is None


def test_only_what_was_taken_is_passed_on() -> None:
    """Not what was refused, and not what found no room."""
    new = Append(ballot(2), tuple(records("12")[1:]), 0)
    taken, _ = step(followed("1", "1"), STREAM, new)
    assert has_taken(taken, STREAM, new)
    assert not has_taken(taken, STREAM - 1, new)
    assert not has_taken(taken, STREAM, Append(ballot(1), (), 0))
    full, _ = step(followed("1", "1"), STREAM, new, has_room=False)
    assert not has_taken(full, STREAM, new)


def test_the_archive_is_told_when_it_has_moved() -> None:
    """To the writer that is followed, and once."""
    before = followed("11", "11")
    assert tidings(before, STREAM, None) is None
    after = archived(before, 0, log("1").last)
    assert tidings(after, STREAM, None) == Archived(ballot(2), 0)
    assert tidings(after, STREAM, 0) is None
    assert tidings(after, STREAM - 1, None) is None
