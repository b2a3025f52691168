"""Leases on WAL objects: what may be claimed, and what becomes of a claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.core.lease import leased_sst_id, new_lease_id, protects
from shalekv.core.manifest import Lease, Manifest
from shalekv.core.wal_lease import (
    find_wal_lease,
    first_protected_wal_id,
    hold_wal,
    holds_wal,
    release_wal,
)
from shalekv.errors import WalUnprotected

EMPTY = Manifest(database_id=bytes(16), manifest_id=7, write_id=bytes(16))
AT_5 = replace(EMPTY, wal_id_last_compacted=5)
JOB = Lease(b"j" * 16, 100, "compactor")
HELD = hold_wal(AT_5, "me", 6, 100)


def test_what_is_protected_begins_at_c_or_where_a_lease_does() -> None:
    """From c on; if nothing is compacted, all; a lease may keep more, even one that has expired."""
    assert first_protected_wal_id(EMPTY) == 0
    assert first_protected_wal_id(AT_5) == 5
    assert first_protected_wal_id(replace(AT_5, leases=(JOB,))) == 5
    older = Lease(b"o" * 16, 1, "expired, and still there", wal_id_min=2)
    assert first_protected_wal_id(replace(AT_5, leases=(JOB, older))) == 2
    assert first_protected_wal_id(HELD) == 5


def test_first_claim_is_refused_below_what_is_protected() -> None:
    """What may be deleted at any moment cannot be claimed; the error says what can."""
    assert find_wal_lease(hold_wal(AT_5, "me", 5, 100), "me")
    with pytest.raises(WalUnprotected, match="object 4 may be deleted") as refused:
        hold_wal(AT_5, "me", 4, 100)
    assert (refused.value.wal_id_min, refused.value.first_wal_id) == (4, 5)
    later = replace(HELD, wal_id_last_compacted=50)
    assert find_wal_lease(hold_wal(later, "you", 6, 100), "you")
    with pytest.raises(WalUnprotected, match="before 6"):
        hold_wal(later, "you", 5, 100)


def test_claim_moves_on_and_never_back() -> None:
    """A renewal keeps where it stands, or goes on; what it let go of cannot be had again."""
    later = replace(HELD, wal_id_last_compacted=50, leases=(JOB, *HELD.leases))
    for asked, stands in ((9, 9), (6, 6), (2, 6)):
        renewed = hold_wal(later, "me", asked, 200)
        assert renewed.leases[0] == JOB
        (lease,) = renewed.leases[1:]
        assert (lease.wal_id_min, lease.expire_time_s, lease.holder) == (stands, 200, "me")
        assert hold_wal(renewed, "me", asked, 200) == renewed


def test_edit_is_found_in_what_follows_it() -> None:
    """A manifest contains a claim that lives at least as long and has got at least as far."""
    assert holds_wal(HELD, "me", 6, 100)
    assert holds_wal(hold_wal(HELD, "me", 9, 300), "me", 6, 100)
    assert not holds_wal(HELD, "me", 7, 100)
    assert not holds_wal(HELD, "me", 6, 101)
    assert not holds_wal(HELD, "you", 6, 100)


def test_release_removes_the_lease_of_its_holder_alone() -> None:
    """Others stay, and one that keeps no WAL is none of them, whatever its holder is called."""
    both = hold_wal(HELD, "you", 8, 100)
    job = replace(JOB, holder="me")
    left = release_wal(replace(both, leases=(*both.leases, job)), "me")
    assert find_wal_lease(left, "me") is None
    assert [lease.holder for lease in left.leases] == ["you", "me"]
    assert release_wal(left, "me") == left


def test_ids_tell_holders_apart_and_protect_no_sst() -> None:
    """Two processes make the same lease for one holder; no SST was ever written under it."""
    (mine,), (yours,) = HELD.leases, hold_wal(AT_5, "you", 6, 1).leases
    assert mine.id != yours.id
    assert hold_wal(EMPTY, "me", 0, 1).leases[0].id == mine.id
    for now_ms in (0, 1_700_000_000_000):
        sst_id = leased_sst_id(new_lease_id(now_ms, bytes(10)), bytes(8))
        assert not protects(mine.id, sst_id)
