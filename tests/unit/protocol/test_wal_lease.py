"""Tests of leases of jobs and on WAL objects, and of the retention of the WAL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import LeaseLost, WalUnprotected
from shalekv.protocol.lease import (
    RANDOM_BYTES,
    check_lease,
    find_wal_lease,
    first_protected_wal_id,
    has_lease,
    hold_wal,
    holds_wal,
    leased_sst_id,
    new_lease_id,
    protects,
    release_wal,
    renew_lease,
    with_lease,
    without_lease,
)
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.protocol.retention import (
    RETENTION_HOLDER,
    Folder,
    Listed,
    WalRetention,
    retain_wal,
    retained_from,
)
from shalekv.protocol.snapshot import NEVER

EMPTY = Manifest(database_id=bytes(16), manifest_id=7, write_id=bytes(16))
AT_5 = replace(EMPTY, wal_id_last_compacted=5)
JOB = Lease(b"j" * 16, 100, "compactor")
HELD = hold_wal(AT_5, "me", 6, 100)


def test_what_is_protected_begins_at_c_or_where_a_lease_does() -> None:
    """Protected WAL objects begin at c, or where a lease begins, even one that has expired."""
    assert first_protected_wal_id(EMPTY) == 0
    assert first_protected_wal_id(AT_5) == 5
    assert first_protected_wal_id(replace(AT_5, leases=(JOB,))) == 5
    older = Lease(b"o" * 16, 1, "expired, and still there", wal_id_min=2)
    assert first_protected_wal_id(replace(AT_5, leases=(JOB, older))) == 2
    assert first_protected_wal_id(HELD) == 5


def test_first_lease_is_refused_below_what_is_protected() -> None:
    """Objects that may be deleted at any moment cannot be leased; the error names the first."""
    assert find_wal_lease(hold_wal(AT_5, "me", 5, 100), "me")
    with pytest.raises(WalUnprotected, match="object 4 may be deleted") as refused:
        hold_wal(AT_5, "me", 4, 100)
    assert (refused.value.wal_id_min, refused.value.first_wal_id) == (4, 5)
    later = replace(HELD, wal_id_last_compacted=50)
    assert find_wal_lease(hold_wal(later, "you", 6, 100), "you")
    with pytest.raises(WalUnprotected, match="before 6"):
        hold_wal(later, "you", 5, 100)


def test_lease_moves_on_and_never_back() -> None:
    """A renewal keeps the first object of a lease or moves it on, and never moves it back."""
    later = replace(HELD, wal_id_last_compacted=50, leases=(JOB, *HELD.leases))
    for asked, granted in ((9, 9), (6, 6), (2, 6)):
        renewed = hold_wal(later, "me", asked, 200)
        assert renewed.leases[0] == JOB
        (lease,) = renewed.leases[1:]
        assert (lease.wal_id_min, lease.expire_time_s, lease.holder) == (granted, 200, "me")
        assert hold_wal(renewed, "me", asked, 200) == renewed


def test_edit_is_found_in_what_follows_it() -> None:
    """A lease is contained in a manifest whose lease lasts as long and has moved as far."""
    assert holds_wal(HELD, "me", 6, 100)
    assert holds_wal(hold_wal(HELD, "me", 9, 300), "me", 6, 100)
    assert not holds_wal(HELD, "me", 7, 100)
    assert not holds_wal(HELD, "me", 6, 101)
    assert not holds_wal(HELD, "you", 6, 100)


def test_release_removes_the_lease_of_its_holder_alone() -> None:
    """A release removes the holder's lease on the WAL, not those of others nor a job's lease."""
    both = hold_wal(HELD, "you", 8, 100)
    job = replace(JOB, holder="me")
    left = release_wal(replace(both, leases=(*both.leases, job)), "me")
    assert find_wal_lease(left, "me") is None
    assert [lease.holder for lease in left.leases] == ["you", "me"]
    assert release_wal(left, "me") == left


def test_ids_distinguish_holders_and_protect_no_sst() -> None:
    """The id of a lease on the WAL depends on its holder alone, and protects no SST."""
    (mine,), (yours,) = HELD.leases, hold_wal(AT_5, "you", 6, 1).leases
    assert mine.id != yours.id
    assert hold_wal(EMPTY, "me", 0, 1).leases[0].id == mine.id
    for now_ms in (0, 1_700_000_000_000):
        sst_id = leased_sst_id(new_lease_id(now_ms, bytes(10)), bytes(8))
        assert not protects(mine.id, sst_id)


YOUNG = WalRetention(kept_from_ms=100, bytes_max=1_000)


def wal(number: int, modified_ms: int, size_bytes: int = 10) -> Listed:
    return Listed(Folder.WAL, f"wal/{number}", size_bytes, modified_ms, number=number)


def aged(*modified_ms: int) -> Sequence[Listed]:
    return [wal(number, at_ms) for number, at_ms in enumerate(modified_ms)]


def leased_from(manifest: Manifest) -> int | None:
    lease = find_wal_lease(manifest, RETENTION_HOLDER)
    return lease.wal_id_min if lease is not None else None


def test_run_begins_with_the_oldest_object_that_is_young() -> None:
    """The run begins with the oldest object at or above the limit; older ones behind it stay."""
    assert retained_from(AT_5, aged(1, 1, 99, 100, 101, 102), YOUNG) == 3
    assert retained_from(AT_5, aged(1, 100, 1, 1, 1, 1), YOUNG) == 1
    assert retained_from(AT_5, aged(*[99] * 6), YOUNG) == 5
    assert retained_from(AT_5, aged(*[100] * 6), YOUNG) == 0
    assert retained_from(AT_5, aged(*[100] * 6), None) == 5
    assert retained_from(EMPTY, aged(*[100] * 6), YOUNG) == 0


@given(
    modified_ms=st.lists(st.integers(0, 200), max_size=20),
    gone=st.sets(st.integers(0, 20)),
    c=st.integers(0, 20),
    bytes_max=st.integers(0, 200),
)
def test_whatever_is_retained_is_there_and_reaches_c(
    modified_ms: list[int], gone: set[int], c: int, bytes_max: int
) -> None:
    """Every slot of the run was listed, its first is young, and its bytes are within bounds."""
    listing = [each for each in aged(*modified_ms) if each.number not in gone]
    manifest = replace(EMPTY, wal_id_last_compacted=c)
    first = retained_from(manifest, listing, replace(YOUNG, bytes_max=bytes_max))
    run = [each for each in listing if each.number is not None and first <= each.number < c]
    assert [each.number for each in run] == list(range(first, c))
    assert sum(each.size_bytes for each in run) <= bytes_max
    assert not run or run[0].modified_ms >= YOUNG.kept_from_ms


def test_lease_follows_the_run() -> None:
    """The lease of the retention never expires, moves on and never back, and can be removed."""
    first = retain_wal(AT_5, 5)
    assert leased_from(first) == 5
    assert first.leases[0].expire_time_s == NEVER
    later = replace(first, wal_id_last_compacted=50)
    assert retain_wal(later, 5) == later
    assert retain_wal(later, 3) == later
    assert leased_from(retain_wal(later, 20)) == 20
    assert retain_wal(later, None).leases == ()


def test_lease_begins_with_what_is_protected() -> None:
    """The lease protects nothing that an older manifest has given up: it may be deleted (F3)."""
    assert leased_from(retain_wal(AT_5, 2)) == 5
    held = replace(hold_wal(AT_5, "me", 5, 1), wal_id_last_compacted=50)
    assert leased_from(retain_wal(held, 2)) == 5
    assert leased_from(retain_wal(held, 9)) == 9


OWN = Lease(b"o" * 16, 100, "compactor", wal_id_min=3)
OTHER = Lease(b"t" * 16, 200, "restore")
BOTH = replace(EMPTY, leases=(OWN, OTHER))


@given(
    now_ms=st.integers(0, 2**48 - 1),
    lease_random=st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES),
    sst_random=st.binary(min_size=8, max_size=8),
)
def test_ids_are_uuids_that_name_their_lease(
    now_ms: int, lease_random: bytes, sst_random: bytes
) -> None:
    """Ids of leases and objects are UUIDs of version 7 with the time and stem of the lease."""
    lease_id = new_lease_id(now_ms, lease_random)
    sst_id = leased_sst_id(lease_id, sst_random)
    for each in (UUID(bytes=lease_id), UUID(bytes=sst_id)):
        assert (each.version, each.variant) == (7, RFC_4122)
        assert each.int >> 80 == now_ms
    assert lease_id[:8] == sst_id[:8]
    assert protects(lease_id, sst_id)
    assert protects(lease_id, lease_id)


def test_lease_that_is_made_again_is_there_once() -> None:
    """An edit that is repeated after a conflict leaves one lease, the last, and all others."""
    once = with_lease(replace(EMPTY, leases=(OTHER,)), OWN)
    assert once.leases == (OTHER, OWN)
    later = replace(OWN, expire_time_s=500)
    assert with_lease(once, later).leases == (OTHER, later)


def test_renewed_lease_is_the_same_but_for_its_end() -> None:
    """A renewal changes only the expiry of that one lease."""
    renewed = renew_lease(BOTH, OWN.id, 900)
    assert renewed == replace(BOTH, leases=(replace(OWN, expire_time_s=900), OTHER))


def test_lost_lease_is_an_error() -> None:
    """Checking or renewing a lease that is not in the manifest raises an error that names it."""
    lost = without_lease(BOTH, OWN.id)
    assert lost.leases == (OTHER,)
    assert not has_lease(lost, OWN.id)
    for refuse in (lambda: check_lease(lost, OWN.id), lambda: renew_lease(lost, OWN.id, 900)):
        with pytest.raises(LeaseLost, match=f"{OWN.id.hex()} is not in manifest 7"):
            refuse()


def test_lease_counts_as_long_as_it_is_there() -> None:
    """A lease that has expired counts until an edit removes it."""
    expired = with_lease(EMPTY, replace(OWN, expire_time_s=0))
    check_lease(expired, OWN.id)
    assert has_lease(expired, OWN.id)
    assert renew_lease(expired, OWN.id, 9).leases[0].expire_time_s == 9
