"""Winning a quorum, and what a leader may take for committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shalekv.core.quorum.election import Candidacy, Leader, epoch_to_claim, next_object
from shalekv.core.quorum.membership import Configuration
from shalekv.core.quorum.messages import Greeting, Health, Vote
from shalekv.core.quorum.record import LogShape, Mark
from shalekv.errors import LogBehindArchive
from tests.unit.core.quorum.logs import TWIN, ballot, ids, log, members, records

THREE = Configuration(0, members("abc"))
JOINT = Configuration(1, members("abc"), members("cde"))


def candidacy(votes: Mapping[str, LogShape], configuration: Configuration = THREE) -> Candidacy:
    """Epoch 9, and the votes of some members."""
    found = Candidacy(ballot(9), configuration)
    for name, shape in votes.items():
        found = found.voted(name.encode() * 16, Vote(ballot(9), shape, 0))
    return found


def leader(epochs: str = "11", configuration: Configuration = THREE) -> Leader:
    """Of epoch 9, with its fence behind this log."""
    everyone = {member.id.decode()[0]: log(epochs) for member in configuration.everyone}
    elected = Leader.of(candidacy(everyone, configuration))
    return elected.appended(records(epochs + "9")[-1])


def test_an_epoch_is_above_all_that_is_known() -> None:
    """The manifest's, and any promise."""

    def greeting(epoch: int) -> Greeting:
        return Greeting(b"", ballot(epoch), LogShape(), 0, Health.SOUND)

    assert epoch_to_claim(4, [greeting(2), greeting(6), greeting(3)]) == 7
    assert epoch_to_claim(4, [greeting(2)]) == 5
    assert epoch_to_claim(4, []) == 5


def test_votes_for_others_and_of_strangers_don_t_count() -> None:
    """A twin's vote, one of an older epoch, and one of who is no member."""
    before = candidacy({"a": log("1")})
    for other in (ballot(8), ballot(9, TWIN)):
        assert before.voted(b"b" * 16, Vote(other, log("1"), 0)) == before
    assert before.voted(b"z" * 16, Vote(ballot(9), log("111"), 0)) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (log("2"), log("1111")),
        (log("111"), log("11")),
        (log("12", trimmed=2), log("1111")),
        (log("1"), log("")),
    ],
)
def test_the_log_of_the_highest_rank_is_taken(one: LogShape, other: LogShape) -> None:
    """CE1, CE2, CE13: whoever has it, and whatever was promised."""
    for first, second in (("a", "b"), ("b", "a")):
        found = candidacy({first: one, second: other})
        assert found.donor_id == first.encode() * 16
        assert found.donor_log == one


def test_the_commit_point_is_the_furthest_that_a_voter_knows() -> None:
    """It may lag."""
    found = candidacy({"a": log("11")}).voted(b"b" * 16, Vote(ballot(9), log("11"), 2))
    assert found.committed_lsn == 2


def test_a_new_epoch_begins_behind_log_and_archive() -> None:
    """And a log that was never written to behind the archive alone."""
    last = log("111").last
    assert next_object(last, archive_tip=None, last_compacted=None) == 3
    assert next_object(last, archive_tip=2, last_compacted=1) == 3
    assert next_object(Mark(), archive_tip=None, last_compacted=None) == 0
    assert next_object(Mark(), archive_tip=7, last_compacted=4) == 8
    assert next_object(Mark(), archive_tip=None, last_compacted=4) == 5


@pytest.mark.parametrize(("tip", "compacted"), [(3, None), (None, 3), (5, 1)])
def test_a_log_that_ends_before_the_archive_is_refused(
    tip: int | None, compacted: int | None
) -> None:
    """CE13: what is archived was committed, and so is what was compacted."""
    with pytest.raises(LogBehindArchive):
        next_object(log("111").last, archive_tip=tip, last_compacted=compacted)


def test_a_log_that_ends_within_the_last_archived_object_is_refused() -> None:
    """CE13: a record that completes the object was committed, and is not in the log."""
    within = replace(log("111").last, ends_object=False)
    assert next_object(within, archive_tip=1, last_compacted=None) == 3
    with pytest.raises(LogBehindArchive):
        next_object(within, archive_tip=2, last_compacted=None)


def test_copies_of_older_records_commit_nothing() -> None:
    """CE6: only with a record of the own epoch is what comes before it committed."""
    found = leader()
    for member_id in ids("abc"):
        found = found.acknowledged(member_id, 2)
    assert found.committed_lsn == 0
    found = found.acknowledged(ids("a")[0], 3)
    assert found.committed_lsn == 0
    assert found.acknowledged(ids("b")[0], 3).committed_lsn == 3


def test_a_member_that_lost_records_counts_for_what_it_has() -> None:
    """What was committed stays so."""
    found = leader()
    a, b = ids("ab")
    found = found.acknowledged(a, 3).acknowledged(b, 3).acknowledged(b, 1)
    assert found.committed_lsn == 3
    assert found.flushed[b] == 1
    found = found.appended(records("1199")[-1]).acknowledged(a, 4)
    assert found.committed_lsn == 3
    assert found.acknowledged(b, 4).committed_lsn == 4


def test_a_change_of_members_needs_both_majorities() -> None:
    """To vote, and to commit."""
    assert not candidacy({"a": log(""), "b": log("")}, JOINT).is_won
    assert not candidacy({"d": log(""), "e": log("")}, JOINT).is_won
    assert candidacy({"a": log(""), "c": log(""), "d": log("")}, JOINT).is_won
    found = leader(configuration=JOINT)
    for member_id in ids("abd"):
        found = found.acknowledged(member_id, 3)
    assert found.committed_lsn == 0
    assert found.acknowledged(ids("e")[0], 3).committed_lsn == 3


def test_a_change_ends_when_the_next_members_have_what_is_committed() -> None:
    """In the own epoch, so that they know this leader."""
    found = leader(configuration=JOINT)
    a, b, c, d = ids("abcd")
    assert not found.may_finish_change
    found = found.acknowledged(a, 3).acknowledged(b, 3).acknowledged(c, 2).acknowledged(d, 2)
    assert not found.may_finish_change
    found = found.acknowledged(c, 3)
    assert not found.may_finish_change
    assert found.acknowledged(d, 3).may_finish_change
    assert not found.acknowledged(d, 3).reconfigured(THREE).may_finish_change
