"""Leases: their ids, and the edits that make, renew, check and end them."""

from __future__ import annotations

from dataclasses import replace
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.lease import (
    RANDOM_BYTES,
    check_lease,
    has_lease,
    leased_sst_id,
    new_lease_id,
    protects,
    renew_lease,
    with_lease,
    without_lease,
)
from shalekv.core.manifest import Lease, Manifest
from shalekv.errors import LeaseLost

OWN = Lease(b"o" * 16, 100, "compactor", wal_id_min=3)
OTHER = Lease(b"t" * 16, 200, "restore")
EMPTY = Manifest(database_id=bytes(16), manifest_id=7, write_id=bytes(16))
BOTH = replace(EMPTY, leases=(OWN, OTHER))


@given(
    now_ms=st.integers(0, 2**48 - 1),
    lease_random=st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES),
    sst_random=st.binary(min_size=8, max_size=8),
)
def test_ids_are_uuids_that_tell_their_lease(
    now_ms: int, lease_random: bytes, sst_random: bytes
) -> None:
    """Lease and object have UUIDs of version 7 with the time of the lease and its random bits."""
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
    """Only the end of that one lease changes."""
    renewed = renew_lease(BOTH, OWN.id, 900)
    assert renewed == replace(BOTH, leases=(replace(OWN, expire_time_s=900), OTHER))


def test_lost_lease_is_told() -> None:
    """To check or renew a lease that is not there is an error, which names it."""
    lost = without_lease(BOTH, OWN.id)
    assert lost.leases == (OTHER,)
    assert not has_lease(lost, OWN.id)
    for refuse in (lambda: check_lease(lost, OWN.id), lambda: renew_lease(lost, OWN.id, 900)):
        with pytest.raises(LeaseLost, match=f"{OWN.id.hex()} is not in manifest 7"):
            refuse()


def test_lease_counts_as_long_as_it_is_there() -> None:
    """Its time alone takes nothing from it: only the edit that removes it does."""
    expired = with_lease(EMPTY, replace(OWN, expire_time_s=0))
    check_lease(expired, OWN.id)
    assert has_lease(expired, OWN.id)
    assert renew_lease(expired, OWN.id, 9).leases[0].expire_time_s == 9
