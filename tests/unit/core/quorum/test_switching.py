"""CE15: what must have happened before the manifest names another WAL mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.core.fencing import WriterId
from shalekv.core.manifest import Manifest, WalMode
from shalekv.core.quorum.election import Leader
from shalekv.core.quorum.switching import enter_quorum, leave_quorum
from shalekv.errors import Fenced, IllegalState, InvalidRequest
from tests.unit.core.quorum.logs import NONCE, TWIN, ballot, ids, members, records
from tests.unit.core.quorum.test_election import leader
from tests.unit.core.quorum.test_membership import manifest

OWN = WriterId(9, NONCE)


def committed(found: Leader) -> Leader:
    """Up to its end."""
    for member_id in ids("ab"):
        found = found.acknowledged(member_id, found.log.last.lsn)
    return found


def current(mode: WalMode = WalMode.QUORUM) -> Manifest:
    """That shows the writer of epoch 9."""
    return replace(manifest(), writer_epoch=9, writer_nonce=NONCE, wal_mode=mode)


def test_a_database_leaves_its_safekeepers_behind_an_archived_last_record() -> None:
    """Then they are nobody's any more."""
    left = leave_quorum(current(), committed(leader()), 2)
    assert (left.wal_mode, left.wal_members) == (WalMode.OBJECT_STORE, ())
    assert left.wal_generation == 8


@pytest.mark.parametrize("tip", [None, 1])
def test_what_is_not_archived_is_not_left(tip: int | None) -> None:
    """The last object has to be there, too."""
    with pytest.raises(IllegalState, match="not in the archive"):
        leave_quorum(current(), committed(leader()), tip)


def test_who_has_no_committed_record_of_its_own_has_fenced_nobody() -> None:
    """Nor is anything left behind in flight, or in an object that was not ended."""
    never_wrote = Leader(ballot(9), leader().configuration, leader("11").log, 3)
    for found in (leader(), committed(leader()).appended(records("1199")[-1])):
        with pytest.raises(IllegalState, match="not a committed one"):
            leave_quorum(current(), found, 9)
    with pytest.raises(IllegalState):
        leave_quorum(current(), never_wrote, 9)
    open_end = replace(records("1199")[-1], ends_object=False)
    with pytest.raises(IllegalState, match="not a committed one"):
        leave_quorum(current(), committed(committed(leader()).appended(open_end)), 9)


def test_who_was_fenced_switches_nothing() -> None:
    """The manifest names another writer."""
    with pytest.raises(Fenced):
        leave_quorum(replace(current(), writer_epoch=10), committed(leader()), 2)
    newer = replace(current(WalMode.OBJECT_STORE), writer_nonce=TWIN)
    with pytest.raises(Fenced):
        enter_quorum(newer, OWN, members("abc"))


def test_a_database_goes_to_safekeepers() -> None:
    """To some of them, at least."""
    before = replace(current(WalMode.OBJECT_STORE), wal_members=())
    entered = enter_quorum(before, OWN, members("abc"))
    assert (entered.wal_mode, entered.wal_members) == (WalMode.QUORUM, manifest().wal_members)
    with pytest.raises(InvalidRequest):
        enter_quorum(before, OWN, ())
