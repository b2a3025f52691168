"""Tests of records and shapes of logs, and of following a log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.format.wal_record import make_record
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum_records import EMPTY_LOG, LogEnd, LogHealth, LogShape, Record
from shalekv.protocol.tail import (
    AppliedPosition,
    Choice,
    MemberTail,
    RecordStatus,
    choose,
    furthest_commit,
    newest_of_majority,
)
from tests.unit.protocol.logs import log, records

EPOCHS = st.lists(st.integers(1, 5), max_size=12).map(sorted).map(lambda n: "".join(map(str, n)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lsn": 4},
        {"epoch": 1},
        {"previous_checksum": 1},
        {"wal_id": 4},
        {"wal_id": 1},
    ],
    ids=str,
)
def test_a_record_follows_its_predecessor_alone(wrong: dict[str, Any]) -> None:
    """CE11: number, epoch, checksum and object must continue those of the record before."""
    *_, second, third = records("122")
    assert third.follows(second.mark)
    assert not replace(third, **wrong).follows(second.mark)


def test_an_object_goes_on_until_it_is_ended() -> None:
    """CE16: a record may go on with an object that was left open, or begin the next."""
    first, second = records("11")
    left_open = replace(first.mark, ends_object=False)
    assert replace(second, wal_id=0).follows(left_open)
    assert second.follows(left_open)
    assert not replace(second, wal_id=0).follows(first.mark)


def test_a_new_log_begins_with_any_object() -> None:
    """The first record of a log may belong to any object, since the archive is not known."""
    (record,) = records("1")
    assert replace(record, wal_id=41).follows(LogEnd())


@given(EPOCHS, EPOCHS, st.integers(0, 12), st.integers(0, 12))
def test_the_common_end_is_the_last_equal_place(
    one: str, other: str, trim_one: int, trim_other: int
) -> None:
    """The common end that is found by sections is the one that a comparison of records finds.

    Logs with a record of the same epoch at the same lsn have to be equal up to there.
    """
    same = [n for n in range(1, min(len(one), len(other)) + 1) if one[n - 1] == other[n - 1]]
    if any(one[:n] != other[:n] for n in same):
        return
    left = log(one, trimmed=min(trim_one, len(one)))
    right = log(other, trimmed=min(trim_other, len(other)))
    first = max(left.base.lsn, right.base.lsn)
    places = [n for n in [0, *same] if n >= first]
    found = left.common_end(right)
    assert (found and found.lsn) == (max(places) if places else None)
    assert found == right.common_end(left)


@given(EPOCHS, st.integers(0, 12), st.integers(0, 12))
def test_a_cut_log_is_as_if_it_had_never_been_longer(epochs: str, trim: int, cut: int) -> None:
    """Truncating and trimming commute with appending."""
    trim = min(trim, len(epochs))
    cut = max(trim, min(cut, len(epochs)))
    kept = log(epochs[:cut], trimmed=trim)
    assert log(epochs, trimmed=trim).truncated(kept.last) == kept


IDS = [bytes([number]) * 16 for number in range(3)]
MEMBERS = tuple(Member(each, f"node{at}:1") for at, each in enumerate(IDS))
CONFIGURATION = Configuration(1, MEMBERS)


def log_records(*places: tuple[int, int, bool]) -> list[Record]:
    """Return a log, given epoch, object and whether it ends that object for each record."""
    made: list[Record] = []
    last = LogEnd()
    for epoch, wal_id, ends in places:
        made.append(make_record(last, epoch=epoch, wal_id=wal_id, ends_object=ends, payload=b"p"))
        last = made[-1].mark
    return made


LOG = log_records(
    (1, 0, True), (1, 1, False), (1, 1, False), (1, 1, True), (1, 2, False), (2, 3, True)
)


def answer(count: int, *, committed: int = 0, health: LogHealth = LogHealth.SOUND) -> MemberTail:
    return MemberTail(health, EMPTY_LOG.appended(LOG[:count]), committed)


def test_record_is_next_once() -> None:
    """Each record of a log that is sent again from its beginning is next exactly once."""
    position = AppliedPosition()
    for count, record in enumerate(LOG):
        assert [position.status_of(each) for each in LOG[:count]] == [RecordStatus.KNOWN] * count
        assert position.status_of(record) is RecordStatus.NEXT
        position = position.after(record)
    assert position == AppliedPosition(3, LOG[-1].mark)


def test_object_ends_with_a_word_of_the_log() -> None:
    """An object ends by its last record, or by the first record of the next object (a fence)."""
    position = AppliedPosition()
    whole = []
    for record in LOG:
        position = position.after(record)
        whole.append((position.wal_id, position.is_open))
    assert whole == [(0, False), (0, True), (0, True), (1, False), (1, True), (3, False)]


def test_gap_and_another_history_are_distinguished() -> None:
    """A gap is distinguished from another record in the place of one that was applied."""
    position = AppliedPosition().after(LOG[0]).after(LOG[1])
    assert position.status_of(LOG[3]) is RecordStatus.GAP
    assert position.status_of(replace(LOG[1], checksum=7)) is RecordStatus.OTHER
    assert position.status_of(replace(LOG[2], previous_checksum=7)) is RecordStatus.OTHER


def test_log_that_has_begun_anew_is_not_taken_for_what_is_known() -> None:
    """A log that begins anew has low lsns but later objects, so its records are not known ones."""
    position = AppliedPosition().after(LOG[0]).after(LOG[1])
    anew = replace(LOG[0], epoch=7, wal_id=5)
    assert position.status_of(anew) is RecordStatus.GAP
    assert position.status_of(replace(anew, lsn=2)) is RecordStatus.GAP
    assert AppliedPosition(3, LOG[5].mark).status_of(anew) is RecordStatus.GAP
    assert AppliedPosition(4).status_of(anew) is RecordStatus.NEXT
    assert AppliedPosition(4, LOG[5].mark).status_of(anew) is RecordStatus.NEXT


def test_only_a_majority_of_sound_members_determines_the_end_of_the_log() -> None:
    """The newest log end needs a majority of sound members, of both sets during a change."""
    answers = {IDS[0]: answer(6), IDS[1]: answer(3, health=LogHealth.REFILLING)}
    assert newest_of_majority(CONFIGURATION, answers) is None
    answers[IDS[2]] = answer(2)
    assert newest_of_majority(CONFIGURATION, answers) == LOG[5].mark
    others = tuple(Member(bytes([9, at] * 8), f"other{at}:1") for at in range(3))
    joint = replace(CONFIGURATION, next=others)
    assert newest_of_majority(joint, answers) is None
    answers |= {each.id: answer(1) for each in others[:2]}
    assert newest_of_majority(joint, answers) == LOG[5].mark


def test_position_holds_what_it_has_and_what_came_in_its_place() -> None:
    """A log end is held by record, by whole object or by a higher epoch; an empty log never is."""
    position = AppliedPosition().after(LOG[0]).after(LOG[1])
    assert position.holds(LOG[0].mark)
    assert position.holds(LOG[1].mark)
    assert not position.holds(LOG[2].mark)
    assert AppliedPosition(1).holds(LOG[3].mark)
    assert not AppliedPosition(1).holds(LOG[4].mark)
    newer = AppliedPosition(1).after(LOG[4]).after(LOG[5])
    assert newer.holds(LogEnd(lsn=9, epoch=1, checksum=1, wal_id=4, ends_object=False))
    assert not position.holds(LogEnd())


def test_freshest_sound_member_with_the_next_record_is_chosen() -> None:
    """Members that are avoided, damaged, trimmed beyond the position or empty are left out."""
    trimmed = LogShape(LOG[3].mark).appended(LOG[4:])
    answers = {
        IDS[0]: answer(6, committed=3),
        IDS[1]: answer(6, committed=5),
        IDS[2]: MemberTail(LogHealth.SOUND, trimmed, 6),
    }
    assert furthest_commit(answers) == 6
    assert choose(answers, AppliedPosition(0)) == Choice(IDS[1], is_archived=False)
    assert choose(answers, AppliedPosition(0), [IDS[1]]) == Choice(IDS[0], is_archived=False)
    assert choose(answers, AppliedPosition(0), IDS[:2]) == Choice(None, is_archived=True)
    assert choose(answers, AppliedPosition(1)) == Choice(IDS[2], is_archived=False)
    assert choose(answers, AppliedPosition(1), IDS) == Choice(None, is_archived=False)
    assert choose({IDS[0]: answer(0)}, AppliedPosition()) == Choice(None, is_archived=True)
    damaged = {IDS[0]: answer(6, health=LogHealth.DAMAGED)}
    assert choose(damaged, AppliedPosition()) == Choice(None, is_archived=False)
