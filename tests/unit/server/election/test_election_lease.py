"""Leases: the setting `elect`, when one may be taken, when it is lost, and its encoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import InvalidSetting
from shalekv.format.coding import crc32c
from shalekv.format.election import NONCE_BYTES, TTL_MS_MAX, decode_lease, encode_lease
from shalekv.format.names import (
    election_name,
    parse_election_name,
    parse_level_name,
    parse_manifest_name,
    parse_wal_name,
)
from shalekv.protocol.lease import (
    KEPT,
    ElectionLease,
    ObservedLease,
    is_outdated,
    lapse_at_ms,
    observe,
    poll_wait_ms,
    renew_wait_ms,
)
from shalekv.server.election.elector import (
    BucketPlace,
    EtcdAddress,
    EtcdPlace,
    KubernetesPlace,
    parse_place,
)

TTL_MS = 3_000
LEASE = ElectionLease("there:7654", b"n" * 16, TTL_MS)
RELEASED = ElectionLease("there:7654", b"n" * 16, TTL_MS, is_released=True)


@given(
    sent_ms=st.floats(0, 1e9),
    travel_ms=st.floats(0, 1e5),
    ttl_ms=st.integers(500, 600_000),
    drift=st.floats(0.95, 1.05),
)
def test_a_holder_gives_up_before_a_candidate_may_take_over(
    sent_ms: float, travel_ms: float, ttl_ms: int, drift: float
) -> None:
    """A holder gives up in time, however late a candidate sees a renewal, and even if the
    candidate's clock is a little faster.
    """
    lapsed_ms = lapse_at_ms(sent_ms, ttl_ms)
    seen_ms = sent_ms + travel_ms
    observed = ObservedLease(1, ElectionLease("h", b"", ttl_ms), seen_ms)
    elapsed_ms = (lapsed_ms - seen_ms) * drift  # by the clock of the candidate
    assert not observed.is_over(seen_ms + elapsed_ms)


def test_a_lease_lasts_from_its_first_sighting() -> None:
    """A lease ages from its first observed; a released one is over at once."""
    first = observe(None, 7, LEASE, 100.0)
    assert observe(first, 7, LEASE, 900.0) is first
    assert not first.is_over(100.0 + TTL_MS - 1)
    assert first.is_over(100.0 + TTL_MS)
    assert not observe(first, 8, LEASE, 100.0 + TTL_MS).is_over(100.0 + TTL_MS)
    assert observe(None, 7, RELEASED, 100.0).is_over(100.0)


def test_several_renewals_fit_into_a_lease() -> None:
    """A lease survives one failed renewal; candidates poll more often than holders renew."""
    assert 2 * renew_wait_ms(TTL_MS) < lapse_at_ms(0.0, TTL_MS)
    assert poll_wait_ms(TTL_MS, 0.0) < poll_wait_ms(TTL_MS, 1.0) < renew_wait_ms(TTL_MS)


def test_the_newest_leases_stay() -> None:
    """The current lease, and the one before it, are not deleted as outdated."""
    assert [each for each in range(30) if not is_outdated(each, 29)] == list(range(29 - KEPT, 30))


leases = st.builds(
    ElectionLease,
    holder=st.text(),
    nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    ttl_ms=st.integers(1, TTL_MS_MAX),
    is_released=st.booleans(),
)
STORED = ElectionLease("there:7654", bytes(16), 3_000)


@given(lease_id=st.integers(0, 2**64 - 1), lease=leases)
def test_what_was_encoded_is_decoded(lease_id: int, lease: ElectionLease) -> None:
    """A lease is decoded under its own id, and under no other."""
    data = encode_lease(lease_id, lease)
    assert decode_lease(lease_id, data) == lease
    assert decode_lease(lease_id + 1, data) is None


def test_it_can_be_read_by_people() -> None:
    """An encoded lease is a line: a checksum, a blank, JSON, and a line feed."""
    body = (
        b'{"holder":"there:7654","id":41,"nonce":"00000000000000000000000000000000",'
        b'"released":false,"ttl_ms":3000}'
    )
    assert encode_lease(41, STORED) == b"%08x %s\n" % (crc32c(body), body)


@given(data=st.binary())
def test_other_bytes_are_no_lease(data: bytes) -> None:
    """Any other bytes, also with a valid checksum, are no lease, and raise nothing."""
    assert decode_lease(0, data) is None
    assert decode_lease(0, b"%08x %s\n" % (crc32c(data), data)) is None


@given(lease_id=st.integers(0, 2**64 - 1))
def test_names_are_their_own(lease_id: int) -> None:
    """A name is parsed to what it was built from, and is no name of another kind."""
    name = election_name(lease_id)
    assert parse_election_name(name) == lease_id
    assert parse_manifest_name(name) is None
    assert parse_wal_name(name) is None
    assert parse_level_name(name) is None
    assert parse_election_name(name + "x") is None


def test_places() -> None:
    """`elect` may name the bucket, a key of etcd on some servers, or a Lease of Kubernetes."""
    assert parse_place("bucket") == BucketPlace()
    assert parse_place("etcd://a:2379/db") == EtcdPlace((EtcdAddress("a", 2379),), "db")
    assert parse_place("etcds://a:1/db") == EtcdPlace((EtcdAddress("a", 1),), "db", has_tls=True)
    several = parse_place("etcd://a.b:1,[::1]:2/shale/db-1")
    assert several == EtcdPlace((EtcdAddress("a.b", 1), EtcdAddress("::1", 2)), "shale/db-1")
    assert isinstance(several, EtcdPlace)
    assert [str(each) for each in several.addresses] == ["a.b:1", "[::1]:2"]
    assert parse_place("kubernetes://db/shale.kv-1") == KubernetesPlace("db", "shale.kv-1")
    assert parse_place("kubernetes:///shale") == KubernetesPlace("", "shale")
    longest = KubernetesPlace("n" * 63, "l" * 253)
    assert parse_place(f"kubernetes://{longest.namespace}/{longest.name}") == longest


@pytest.mark.parametrize(
    "elect",
    [
        "buckets",
        "Bucket",
        "etcd://",
        "etcd://a:1",
        "etcd://a:1/",
        "etcd://a/db",
        "etcd://a:0/db",
        "etcd://a:99999/db",
        "etcd://a:1,/db",
        "etcd://a:1/d b",
        "etcds://a/db",
        "etcdss://a:1/db",
        "http://a:1/db",
        "kubernetes://",
        "kubernetes://db",
        "kubernetes://db/",
        "kubernetes:///",
        "kubernetes://db/Shale",
        "kubernetes://db/shale_kv",
        "kubernetes://db/-shale",
        "kubernetes://db/shale.",
        "kubernetes://db/shale..kv",
        "kubernetes://db/shale/kv",
        "kubernetes://d.b/shale",
        "kubernetes://DB/shale",
        f"kubernetes://{'n' * 64}/shale",
        f"kubernetes://db/{'l' * 254}",
    ],
)
def test_other_texts_are_refused(elect: str) -> None:
    """Other texts are refused, by the name of the setting."""
    with pytest.raises(InvalidSetting, match=r"^--elect"):
        parse_place(elect)
