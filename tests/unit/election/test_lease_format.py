"""Leases as objects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.leasing import ElectionLease
from shalekv.format.coding import crc32c
from shalekv.format.election import NONCE_BYTES, TTL_MS_MAX, decode_lease, encode_lease
from shalekv.format.names import (
    election_name,
    parse_election_name,
    parse_level_name,
    parse_manifest_name,
    parse_wal_name,
)

leases = st.builds(
    ElectionLease,
    holder=st.text(),
    nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    ttl_ms=st.integers(1, TTL_MS_MAX),
    is_released=st.booleans(),
)
LEASE = ElectionLease("there:7654", bytes(16), 3_000)


@given(lease_id=st.integers(0, 2**64 - 1), lease=leases)
def test_what_was_encoded_is_decoded(lease_id: int, lease: ElectionLease) -> None:
    """Under its own id, and under no other."""
    data = encode_lease(lease_id, lease)
    assert decode_lease(lease_id, data) == lease
    assert decode_lease(lease_id + 1, data) is None


def test_it_can_be_read_by_people() -> None:
    """The layout that the format has: a checksum, a blank, JSON, and the end of a line."""
    body = (
        b'{"holder":"there:7654","id":41,"nonce":"00000000000000000000000000000000",'
        b'"released":false,"ttl_ms":3000}'
    )
    assert encode_lease(41, LEASE) == b"%08x %s\n" % (crc32c(body), body)


@given(data=st.binary())
def test_other_bytes_are_no_lease(data: bytes) -> None:
    """Whatever lies there, also with a checksum that is right, nothing is raised."""
    assert decode_lease(0, data) is None
    assert decode_lease(0, b"%08x %s\n" % (crc32c(data), data)) is None


@given(lease_id=st.integers(0, 2**64 - 1))
def test_names_are_their_own(lease_id: int) -> None:
    """A name is parsed as what it was built from, and is no name of another kind."""
    name = election_name(lease_id)
    assert parse_election_name(name) == lease_id
    assert parse_manifest_name(name) is None
    assert parse_wal_name(name) is None
    assert parse_level_name(name) is None
    assert parse_election_name(name + "x") is None
