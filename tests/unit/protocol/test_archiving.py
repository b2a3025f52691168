"""Tests of archiving: the objects that records make, trimming, and the choice of an archiver."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from shalekv.protocol.membership import (
    Appointment,
    Candidate,
    Configuration,
    LogObject,
    Member,
    archive_tip,
    complete_objects,
    takeover_place,
    trim_mark,
)
from shalekv.protocol.quorum.proposer import (
    Grouping,
    GroupingPolicy,
    ObjectPosition,
)
from shalekv.protocol.quorum_records import LogEnd, Record

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
TRIO = Configuration(1, tuple(Member(each, f"{each[:1].decode()}:1") for each in (A, B, C)))


def records_of(text: str, first_lsn: int = 1) -> list[Record]:
    """Return a record for each digit, of the object with that id; a dot ends the object."""
    found: list[Record] = []
    for sign in text:
        if sign == ".":
            found[-1] = replace(found[-1], ends_object=True)
        else:
            lsn = first_lsn + len(found)
            found.append(
                Record(lsn, 1, int(sign), ends_object=False, previous_checksum=0, checksum=lsn)
            )
    return found


def objects_of(text: str, committed_lsn: int) -> list[tuple[int, int, int]]:
    found = complete_objects(records_of(text), committed_lsn)
    return [(each.wal_id, each.first_lsn, each.last.lsn) for each in found]


def test_an_object_left_open_is_complete_when_a_later_one_is_begun() -> None:
    """An object without an end is complete once the first record of a later one is committed."""
    assert objects_of("001.", 2) == []
    assert objects_of("001.", 3) == [(0, 1, 2), (1, 3, 3)]
    assert objects_of("0012", 4) == [(0, 1, 2), (1, 3, 3)]


def test_the_archive_reaches_to_its_first_hole() -> None:
    """Compacted objects count as archived, and objects behind a hole do not."""
    assert archive_tip(set(), None) is None
    assert archive_tip({0, 1, 3}, None) == 1
    assert archive_tip({1}, None) is None
    assert archive_tip({4, 5, 7}, 3) == 5
    assert archive_tip({3}, 9) == 9


def marked(wal_id: int, last_lsn: int) -> LogObject:
    return LogObject(wal_id, last_lsn, LogEnd(last_lsn, 1, 0, wal_id, ends_object=True))


def test_only_what_was_listed_and_is_committed_is_trimmed() -> None:
    """Whole objects are trimmed in order, up to the archive's own list and the commit point."""
    objects = [marked(4, 10), marked(5, 20), marked(6, 30)]

    def trimmed(seen_wal_id: int | None, committed_lsn: int) -> int | None:
        mark = trim_mark(objects, seen_wal_id=seen_wal_id, committed_lsn=committed_lsn)
        return None if mark is None else mark.lsn

    assert trimmed(None, 30) is None
    assert trimmed(3, 30) is None
    assert trimmed(5, 30) == 20
    assert trimmed(6, 29) == 20
    assert trimmed(9, 99) == 30
    assert trimmed(9, 9) is None


def test_members_take_over_one_after_the_other() -> None:
    """Each member has a different place, and the appointed one, which does nothing, is last."""
    for appointed in (A, B, C, b""):
        places = [takeover_place(each, TRIO, appointed) for each in (A, B, C)]
        assert sorted(places) == [0, 1, 2]
        if appointed:
            assert takeover_place(appointed, TRIO, appointed) == 2
    assert takeover_place(b"x" * 16, TRIO, A) == 3


def candidate(
    member_id: bytes, lsn: int, archived: int | None = None, *, is_fit: bool = True
) -> Candidate:
    return Candidate(member_id, is_fit, lsn, archived)


def judged(
    present: Appointment, candidates: list[Candidate], now_ms: float, complete: int | None = 9
) -> Appointment:
    """Return the next appointment with a takeover time of 100 ms."""
    return present.judged(candidates, now_ms, complete_wal_id=complete, takeover_ms=100)


def test_the_most_advanced_fit_member_is_appointed() -> None:
    """The fit member with the longest log is appointed, and none if none is fit."""
    all_of = [candidate(A, 5), candidate(B, 7, is_fit=False), candidate(C, 6)]
    assert judged(Appointment(), all_of, 0).member_id == C
    assert judged(Appointment(), all_of[1:2], 0).member_id == b""
    assert judged(Appointment(), [], 0).member_id == b""


def test_an_appointment_stays_while_the_archive_progresses() -> None:
    """An appointment stays while the archive progresses or nothing waits."""
    present = judged(Appointment(), [candidate(A, 5), candidate(B, 4)], 0)
    for archived, now_ms in ((1, 90), (2, 180), (3, 270)):
        present = judged(present, [candidate(A, 5, archived), candidate(B, 50)], now_ms)
        assert present.member_id == A
    idle = judged(present, [candidate(A, 5, 9), candidate(B, 50)], 1_000)
    assert idle.member_id == A
    assert judged(idle, [candidate(A, 5, 9), candidate(B, 50)], 9_000).member_id == A


def test_every_member_has_a_turn_while_the_archive_makes_no_progress() -> None:
    """An archiver without progress is replaced by each of the others in turn, round after round."""
    members = [candidate(A, 9, 1), candidate(B, 8, 1), candidate(C, 7, 1)]
    present = judged(Appointment(), members, 0)
    asked = [present.member_id]
    for now_ms in range(100, 900, 100):
        assert judged(present, members, now_ms - 1).member_id == asked[-1]
        present = judged(present, members, now_ms)
        asked.append(present.member_id)
    assert asked[:3] == [A, B, C]
    assert set(asked[3:]) == {A, B, C}
    assert all(one != other for one, other in pairwise(asked))


POLICY = GroupingPolicy(interval_ms=100, object_bytes=1_000)


def test_records_of_one_interval_share_an_object() -> None:
    """Records within one interval go into one object, and the first after it ends the object."""
    grouping = Grouping(POLICY, next_wal_id=7)
    places = []
    for now_ms in (0, 1, 99, 100, 101):
        place, grouping = grouping.take(10, now_ms)
        places.append(place)
    assert places == [
        ObjectPosition(7, ends_object=False),
        ObjectPosition(7, ends_object=False),
        ObjectPosition(7, ends_object=False),
        ObjectPosition(7, ends_object=True),
        ObjectPosition(8, ends_object=False),
    ]


def test_an_object_passes_its_size_only_by_one_record() -> None:
    """A record that would make an object too large begins another; one that fills it ends it."""
    grouping = Grouping(POLICY, next_wal_id=0)
    places = []
    for size_bytes in (600, 500, 500, 5_000, 1):
        place, grouping = grouping.take(size_bytes, 0)
        places.append(place)
    assert places == [
        ObjectPosition(0, ends_object=False),
        ObjectPosition(1, ends_object=False),
        ObjectPosition(1, ends_object=True),
        ObjectPosition(2, ends_object=True),
        ObjectPosition(3, ends_object=False),
    ]


def test_fences_and_loads_are_alone() -> None:
    """A record that is taken alone begins and ends an object, even while another is open."""
    _, grouping = Grouping(POLICY, next_wal_id=3).take(10, 0)
    place, grouping = grouping.take_alone()
    assert place == ObjectPosition(4, ends_object=True)
    assert grouping.take(10, 1)[0] == ObjectPosition(5, ends_object=False)


def test_an_idle_object_is_sealed_when_its_interval_is_over() -> None:
    """An open object has a time at which it has to be sealed; afterwards none is open."""
    grouping = Grouping(POLICY, next_wal_id=3)
    assert grouping.seal() is None
    assert grouping.seal_due_ms is None
    _, grouping = grouping.take(10, 50)
    assert grouping.seal_due_ms == 150
    sealed = grouping.seal()
    assert sealed is not None
    place, grouping = sealed
    assert place == ObjectPosition(3, ends_object=True)
    assert grouping.seal() is None
    assert grouping.take(10, 151)[0].wal_id == 4
