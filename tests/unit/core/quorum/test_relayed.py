"""Appends that another member has passed on: they count as the writer's own, or not at all."""

from __future__ import annotations

import pytest

from shalekv.core.quorum.acceptor import (
    AcceptorState,
    Commit,
    Flush,
    Reply,
    Write,
    archived,
    disconnected,
    has_taken,
    step,
    step_relayed,
    tidings,
)
from shalekv.core.quorum.messages import Append, Appended, Archived, Elected, VoteRequest
from tests.unit.core.quorum.logs import ME, TWIN, ballot, log, records, state

STREAM = 7


def followed(epochs: str, epoch: int = 2) -> AcceptorState:
    """A member with this log that follows a leader with the same."""
    return step(state(epochs), STREAM, Elected(ME, ballot(epoch), log(epochs)))[0]


def test_records_are_acknowledged_to_the_writer() -> None:
    """They are written and flushed as if they had come on its stream, where the reply goes."""
    new = tuple(records("122")[1:])
    message = Append(ballot(2), new, 3)
    relayed = step_relayed(followed("1"), message)
    assert relayed == step(followed("1"), STREAM, message)
    assert relayed is not None
    expected = [Write(new), Flush(), Reply(STREAM, Appended(ballot(2), 3)), Commit(3)]
    assert relayed[1] == expected


def test_the_two_ways_may_bring_records_in_any_order() -> None:
    """What has come already is not answered again; what overlaps is taken from where it is new."""
    before = followed("1")
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


def test_records_that_do_not_follow_are_dropped() -> None:
    """CE11: they are chained, whichever way they come."""
    assert step_relayed(followed("1"), Append(ballot(2), tuple(records("22")[1:]), 0)) is None


@pytest.mark.parametrize("other", [ballot(1), ballot(3), ballot(2, TWIN)])
def test_another_writer_is_not_followed(other: object) -> None:
    """Neither an older one, nor a newer one that was not elected here, nor a twin (CE10, CE14)."""
    new = tuple(records("11")[1:])
    assert isinstance(other, type(ballot(1)))
    assert step_relayed(followed("1"), Append(other, new, 2)) is None


def test_nothing_counts_without_the_stream_of_the_writer() -> None:
    """A member that has no leader drops even a commit point (CE12), as one that has voted does."""
    cut_off = disconnected(followed("11"), STREAM)
    assert step_relayed(cut_off, Append(ballot(2), (), 2)) is None
    voted, _ = step(followed("11"), 9, VoteRequest(ME, ballot(3)))
    assert step_relayed(voted, Append(ballot(2), (), 2)) is None
    assert step_relayed(voted, Append(ballot(3), (), 2)) is None


def test_only_what_was_taken_is_passed_on() -> None:
    """Not what was refused, and not what found no room."""
    new = Append(ballot(2), tuple(records("12")[1:]), 0)
    taken, _ = step(followed("1"), STREAM, new)
    assert has_taken(taken, STREAM, new)
    assert not has_taken(taken, STREAM - 1, new)
    assert not has_taken(taken, STREAM, Append(ballot(1), (), 0))
    full, _ = step(followed("1"), STREAM, new, has_room=False)
    assert not has_taken(full, STREAM, new)


def test_the_archive_is_told_when_it_has_moved() -> None:
    """To the writer that is followed, and once."""
    before = followed("11")
    assert tidings(before, STREAM, None) is None
    after = archived(before, 0, log("1").last)
    assert tidings(after, STREAM, None) == Archived(ballot(2), 0)
    assert tidings(after, STREAM, 0) is None
    assert tidings(after, STREAM - 1, None) is None
