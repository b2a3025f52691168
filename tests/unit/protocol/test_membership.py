"""Tests of members and majorities, of elections, and of the switch between the WAL modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shalekv.errors import Fenced, IllegalState, InvalidRequest, LogBehindArchive
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import (
    MEMBERS_MAX,
    Configuration,
    Member,
    MembershipStatus,
    begin_change,
    cancel_change,
    check_members,
    finish_change,
    force_members,
    membership_status,
)
from shalekv.protocol.quorum.proposer import (
    LEFT_OUT_COUNT,
    Candidacy,
    Leader,
    enter_quorum,
    epoch_to_claim,
    leave_quorum,
    next_object,
)
from shalekv.protocol.quorum_records import Greeting, LogEnd, LogHealth, LogShape, Vote
from tests.unit.protocol.logs import NONCE, TWIN, ballot, ids, log, members, records

OWN = WriterId(5, NONCE)


def manifest(names: str = "abc", following: str = "") -> Manifest:
    return Manifest(
        database_id=bytes(16),
        manifest_id=3,
        write_id=bytes(16),
        wal_mode=WalMode.QUORUM,
        wal_generation=7,
        wal_members=tuple(map(str, members(names))),
        wal_members_next=tuple(map(str, members(following))),
        writer_epoch=OWN.epoch,
        writer_nonce=OWN.nonce,
    )


def test_a_member_is_written_as_it_is_read() -> None:
    """A member's form in the manifest is parsed back to the same member."""
    (member,) = members("a")
    assert Member.parse(str(member)) == member
    assert str(member) == "61" * 16 + "@a:1"
    with pytest.raises(ValueError, match="hex"):
        Member.parse("x@a:1")


@pytest.mark.parametrize(
    ("names", "voters", "wins"),
    [
        ("abc", "a", False),
        ("abc", "ab", True),
        ("abc", "xyz", False),
        ("abcd", "ab", False),
        ("abcd", "abc", True),
        ("abcde", "ab", False),
        ("abcde", "abc", True),
        ("a", "a", True),
    ],
)
def test_a_majority_is_more_than_half(names: str, voters: str, *, wins: bool) -> None:
    """A majority is more than half, of an even number, too; non-members do not count."""
    configuration = Configuration(0, members(names))
    assert configuration.is_majority(ids(voters)) == wins
    reached = configuration.reached_by_majority(lambda each: 5 if each in ids(voters) else 2)
    assert reached == (5 if wins else 2)


def test_two_sets_decide_during_a_change() -> None:
    """During a change both sets need a majority; a member of both counts in both."""
    configuration = Configuration.of(manifest("abc", "cde"))
    assert configuration.is_joint
    assert [member.id for member in configuration.everyone] == ids("abcde")
    assert not configuration.is_majority(ids("abc"))
    assert not configuration.is_majority(ids("cde"))
    assert configuration.is_majority(ids("bcd"))
    assert configuration.is_majority_of_next(ids("de"))
    assert not configuration.is_majority_of_next(ids("abc"))
    reached = dict(zip(ids("abcde"), (9, 8, 7, 3, 1), strict=True))
    assert configuration.reached_by_majority(reached.__getitem__) == 3


def test_a_change_is_two_edits() -> None:
    """A change is two edits, and each begins a new generation."""
    joint = begin_change(manifest(), members("abd"))
    assert (joint.wal_generation, joint.wal_members) == (8, manifest().wal_members)
    assert Configuration.of(joint).next == members("abd")
    done = finish_change(joint, own=OWN, generation=8)
    assert done == replace(manifest("abd"), wal_generation=9)
    assert cancel_change(joint) == replace(manifest(), wal_generation=9)


def test_one_change_at_a_time() -> None:
    """A second change is refused while one is under way, and so is one to the present members."""
    joint = begin_change(manifest(), members("abd"))
    assert begin_change(joint, members("abd")) == joint
    with pytest.raises(InvalidRequest, match="is under way"):
        begin_change(joint, members("abe"))
    with pytest.raises(InvalidRequest, match="already"):
        begin_change(manifest(), members("abc"))
    with pytest.raises(InvalidRequest, match="no safekeepers"):
        begin_change(replace(manifest(), wal_mode=WalMode.OBJECT_STORE), members("abd"))


def test_only_the_current_writer_ends_a_change() -> None:
    """A fenced writer, or one with the same epoch and another nonce, cannot finish a change."""
    joint = begin_change(manifest(), members("abd"))
    for stranger in (WriterId(4, NONCE), WriterId(5, TWIN)):
        with pytest.raises(Fenced):
            finish_change(joint, own=stranger, generation=8)


def test_members_are_some_and_different() -> None:
    """Members are at least one, at most `MEMBERS_MAX`, and differ in id and in address."""
    check_members(members("abc"))
    a, b = members("ab")
    for wrong in ((), members("abcdefghij"), (a, a), (a, Member(b.id, a.address))):
        with pytest.raises(InvalidRequest):
            check_members(wrong)
    assert len(members("abcdefghij")) == MEMBERS_MAX + 1


THREE = Configuration(0, members("abc"))


def candidacy(votes: Mapping[str, LogShape]) -> Candidacy:
    found = Candidacy(ballot(9), THREE)
    for name, shape in votes.items():
        found = found.voted(name.encode() * 16, Vote(ballot(9), shape, 0))
    return found


def leader() -> Leader:
    elected = Leader.of(candidacy(dict.fromkeys("abc", log("11"))))
    return elected.appended(records("119")[-1])


def test_an_epoch_is_above_all_that_is_known() -> None:
    """The epoch to claim is above that of the manifest and above every promise."""

    def greeting(epoch: int) -> Greeting:
        return Greeting(b"", ballot(epoch), LogShape(), 0, LogHealth.SOUND)

    assert epoch_to_claim(4, [greeting(2), greeting(6), greeting(3)]) == 7
    assert epoch_to_claim(4, [greeting(2)]) == 5
    assert epoch_to_claim(4, []) == 5


def test_votes_for_others_and_of_strangers_don_t_count() -> None:
    """A vote for another epoch or nonce, or of a non-member, does not count."""
    before = candidacy({"a": log("1")})
    for other in (ballot(8), ballot(9, TWIN)):
        assert before.voted(b"b" * 16, Vote(other, log("1"), 0)) == before
    assert before.voted(b"z" * 16, Vote(ballot(9), log("111"), 0)) == before


def test_the_commit_point_is_the_furthest_that_a_voter_knows() -> None:
    """The commit point of a candidacy is the furthest that any voter knows."""
    found = candidacy({"a": log("11")}).voted(b"b" * 16, Vote(ballot(9), log("11"), 2))
    assert found.committed_lsn == 2


def test_a_new_epoch_begins_behind_log_and_archive() -> None:
    """A new epoch begins behind log and archive, and behind the archive if the log is empty."""
    last = log("111").last
    assert next_object(last, archive_tip=None, last_compacted=None) == 3
    assert next_object(last, archive_tip=2, last_compacted=1) == 3
    assert next_object(LogEnd(), archive_tip=None, last_compacted=None) == 0
    assert next_object(LogEnd(), archive_tip=7, last_compacted=4) == 8
    assert next_object(LogEnd(), archive_tip=None, last_compacted=4) == 5


def test_a_log_that_ends_within_the_last_archived_object_is_refused() -> None:
    """CE13: a log that lacks the end of the last archived object has lost a committed record."""
    within = replace(log("111").last, ends_object=False)
    assert next_object(within, archive_tip=1, last_compacted=None) == 3
    with pytest.raises(LogBehindArchive):
        next_object(within, archive_tip=2, last_compacted=None)


def test_a_member_that_lost_records_counts_for_what_it_has() -> None:
    """A member that lost records counts with those it has, and committed records stay committed."""
    found = leader()
    a, b = ids("ab")
    found = found.acknowledged(a, 3).acknowledged(b, 3).acknowledged(b, 1)
    assert found.committed_lsn == 3
    assert found.flushed[b] == 1
    found = found.appended(records("1199")[-1]).acknowledged(a, 4)
    assert found.committed_lsn == 3
    assert found.acknowledged(b, 4).committed_lsn == 4


WRITER = WriterId(9, NONCE)


def committed(found: Leader) -> Leader:
    for member_id in ids("ab"):
        found = found.acknowledged(member_id, found.log.last.lsn)
    return found


def shown(mode: WalMode = WalMode.QUORUM) -> Manifest:
    return replace(manifest(), writer_epoch=9, writer_nonce=NONCE, wal_mode=mode)


def test_a_database_leaves_its_safekeepers_behind_an_archived_last_record() -> None:
    """A switch to the object store removes the members, once the last record is archived."""
    left = leave_quorum(shown(), committed(leader()), 2)
    assert (left.wal_mode, left.wal_members) == (WalMode.OBJECT_STORE, ())
    assert left.wal_generation == 8


@pytest.mark.parametrize("tip", [None, 1])
def test_unarchived_records_are_not_dropped(tip: int | None) -> None:
    """A switch to the object store is refused while the last object is not archived."""
    with pytest.raises(IllegalState, match="not in the archive"):
        leave_quorum(shown(), committed(leader()), tip)


def test_a_switch_needs_a_committed_last_record_of_its_own() -> None:
    """A switch is refused unless the last record is committed, of its epoch, and ends an object."""
    never_wrote = Leader(ballot(9), leader().configuration, leader().log, 3)
    for found in (leader(), committed(leader()).appended(records("1199")[-1])):
        with pytest.raises(IllegalState, match="not a committed one"):
            leave_quorum(shown(), found, 9)
    with pytest.raises(IllegalState):
        leave_quorum(shown(), never_wrote, 9)
    open_end = replace(records("1199")[-1], ends_object=False)
    with pytest.raises(IllegalState, match="not a committed one"):
        leave_quorum(shown(), committed(committed(leader()).appended(open_end)), 9)


def test_a_fenced_writer_switches_nothing() -> None:
    """A switch in either direction is refused if the manifest names another writer."""
    with pytest.raises(Fenced):
        leave_quorum(replace(shown(), writer_epoch=10), committed(leader()), 2)
    newer = replace(shown(WalMode.OBJECT_STORE), writer_nonce=TWIN)
    with pytest.raises(Fenced):
        enter_quorum(newer, WRITER, members("abc"), 6)


def test_a_database_goes_to_safekeepers() -> None:
    """A switch to safekeepers names them in the manifest, and needs at least one."""
    before = replace(shown(WalMode.OBJECT_STORE), wal_members=(), wal_id_last_compacted=6)
    entered = enter_quorum(before, WRITER, members("abc"), 6)
    assert (entered.wal_mode, entered.wal_members) == (WalMode.QUORUM, manifest().wal_members)
    with pytest.raises(InvalidRequest):
        enter_quorum(before, WRITER, (), 6)


def test_the_log_of_safekeepers_begins_behind_ids_that_are_left_out() -> None:
    """The new log begins behind ids that are left out, where no older opener puts fences (CE17)."""
    before = replace(shown(WalMode.OBJECT_STORE), wal_id_last_compacted=6)
    with pytest.raises(IllegalState, match="WAL object 7 is not compacted"):
        enter_quorum(before, WRITER, members("abc"), 7)
    entered = enter_quorum(before, WRITER, members("abc"), 5)  # a stray fence was compacted, too
    (left_out,) = entered.wal_ids_left_out
    assert (left_out.start, len(left_out)) == (7, LEFT_OUT_COUNT)
    assert entered.first_uncompacted_wal_id == left_out.stop
    assert entered.compactor_epoch == before.compactor_epoch + 1


@pytest.mark.parametrize(
    ("name", "promise", "found", "status"),
    [
        ("a", 5, manifest("abc"), MembershipStatus.NAMED),
        ("d", 5, manifest("abc", "abd"), MembershipStatus.NAMED),
        ("d", 5, manifest("abc"), MembershipStatus.UNNAMED),
        ("a", 5, replace(manifest("abc"), wal_mode=WalMode.OBJECT_STORE), MembershipStatus.UNNAMED),
        ("d", 6, manifest("abc"), MembershipStatus.UNKNOWN),
        ("a", 5, replace(manifest("abc"), database_id=b"d" * 16), MembershipStatus.DISPLACED),
    ],
)
def test_status_of_a_member(
    name: str, promise: int, found: Manifest, status: MembershipStatus
) -> None:
    """A manifest of a lower epoch than a member has promised does not say that it is unnamed."""
    (member_id,) = ids(name)
    assert status is membership_status(
        found, database_id=bytes(16), member_id=member_id, promise=ballot(promise)
    )


def test_forced_members_fence_the_writer() -> None:
    """Members chosen without a majority come with a new epoch, and only as long as nobody opens."""
    before = manifest("abc", "abd")
    forced = force_members(before, before=before, members=members("c"), nonce=TWIN)
    assert (forced.writer_epoch, forced.writer_nonce) == (OWN.epoch + 1, TWIN)
    assert Configuration.of(forced) == Configuration(8, members("c"))
    for changed in (replace(before, writer_epoch=6), replace(before, wal_generation=8)):
        with pytest.raises(InvalidRequest, match="look again"):
            force_members(changed, before=before, members=members("c"), nonce=TWIN)
