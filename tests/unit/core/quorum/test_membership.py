"""Who the members are, and how they change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.core.fencing import WriterId
from shalekv.core.manifest import Manifest, WalMode
from shalekv.core.quorum.membership import (
    MEMBERS_MAX,
    Configuration,
    Member,
    begin_change,
    cancel_change,
    check_members,
    finish_change,
)
from shalekv.errors import Fenced, InvalidRequest
from tests.unit.core.quorum.logs import NONCE, TWIN, ids, members

OWN = WriterId(5, NONCE)


def manifest(names: str = "abc", following: str = "") -> Manifest:
    """Of a database with these safekeepers."""
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
    """Its id and its address, which may have an @ before it."""
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
    """Of an even number, too; strangers don't count."""
    configuration = Configuration(0, members(names))
    assert configuration.is_majority(ids(voters)) == wins
    reached = configuration.reached_by_majority(lambda each: 5 if each in ids(voters) else 2)
    assert reached == (5 if wins else 2)


def test_two_sets_decide_during_a_change() -> None:
    """Each by a majority of its own; who is in both counts in both."""
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
    """Each makes a generation of its own."""
    joint = begin_change(manifest(), members("abd"))
    assert (joint.wal_generation, joint.wal_members) == (8, manifest().wal_members)
    assert Configuration.of(joint).next == members("abd")
    done = finish_change(joint, own=OWN, generation=8)
    assert done == replace(manifest("abd"), wal_generation=9)
    assert cancel_change(joint) == replace(manifest(), wal_generation=9)


def test_one_change_at_a_time() -> None:
    """Another has to wait, and what is there already is no change."""
    joint = begin_change(manifest(), members("abd"))
    with pytest.raises(InvalidRequest, match="is under way"):
        begin_change(joint, members("abe"))
    with pytest.raises(InvalidRequest, match="already"):
        begin_change(manifest(), members("abc"))
    with pytest.raises(InvalidRequest, match="no safekeepers"):
        begin_change(replace(manifest(), wal_mode=WalMode.OBJECT_STORE), members("abd"))


def test_only_the_current_writer_ends_a_change() -> None:
    """Who was fenced has seen to another log, and a twin to none."""
    joint = begin_change(manifest(), members("abd"))
    for stranger in (WriterId(4, NONCE), WriterId(5, TWIN)):
        with pytest.raises(Fenced):
            finish_change(joint, own=stranger, generation=8)


def test_only_the_change_that_was_seen_to_is_ended() -> None:
    """Another may have been begun since, with members that hold nothing."""
    joint = begin_change(manifest(), members("abd"))
    other = begin_change(cancel_change(joint), members("xyz"))
    with pytest.raises(InvalidRequest, match="another was begun"):
        finish_change(other, own=OWN, generation=8)
    with pytest.raises(InvalidRequest, match="was cancelled"):
        finish_change(cancel_change(joint), own=OWN, generation=9)


def test_members_are_some_and_different() -> None:
    """By id and by address."""
    check_members(members("abc"))
    a, b = members("ab")
    for wrong in ((), members("abcdefghij"), (a, a), (a, Member(b.id, a.address))):
        with pytest.raises(InvalidRequest):
            check_members(wrong)
    assert len(members("abcdefghij")) == MEMBERS_MAX + 1
