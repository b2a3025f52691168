"""Idempotency keys: what is remembered, for how long, and its memory."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import KeyExpired, Stopping
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    encode_idempotency_record,
    record_key,
)
from shalekv.protocol.entry import Entry, Kind
from shalekv.read.sorted_runs import entries_bytes
from shalekv.write.commit import KeyedRequest, Receipt
from shalekv.write.idempotency import AppliedRequest, Idempotency, key_of_principal

WINDOW_MS = 1_000
START_MS = 1_700_000_000_000
OLD_MS = START_MS - 2 * WINDOW_MS
YEAR_MS = 365 * 86_400_000
HASH = b"h" * 16


class Keys:
    """Idempotency keys at a time that the test sets."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.idempotency = Idempotency(window_ms=WINDOW_MS, now_ms=lambda: self.now_ms)

    def land(self, key: bytes, seq: int = 7, reply: bytes = b"reply") -> Entry:
        record = IdempotencyRecord(HASH, 12, ReplyKind.WRITE, reply)
        expire_at_ms = self.idempotency.expiry_ms()
        entry = Entry(
            record_key(key), seq, Kind.PUT, encode_idempotency_record(record), expire_at_ms
        )
        self.idempotency.land([entry])
        return entry

    def state_of(self, key: bytes) -> str:
        try:
            found = self.idempotency.find(key, HASH)
        except KeyExpired:
            return "expired"
        return {type(None): "new", AppliedRequest: "remembered"}.get(type(found), "pending")


def uuid7(made_ms: int, *, version: int = 7, variant: int = 0b10) -> bytes:
    rest = bytes((version << 4, 1, variant << 6, *range(7)))
    return made_ms.to_bytes(6, "big") + rest


def test_key_lives_for_one_window_and_is_known_as_expired_for_another() -> None:
    """A key is known for one window and expired for another, to the millisecond, then forgotten."""
    keys = Keys()
    keys.land(b"k")
    for passed_ms, expected in (
        (WINDOW_MS - 1, "remembered"),
        (WINDOW_MS, "expired"),
        (2 * WINDOW_MS - 1, "expired"),
        (2 * WINDOW_MS, "new"),
    ):
        keys.now_ms = START_MS + passed_ms
        keys.land(b"other")
        assert keys.state_of(b"k") == expected, passed_ms
    assert len(keys.idempotency) == 1


def test_expired_records_are_dropped_after_a_replay() -> None:
    """A database without writes for two windows remembers no key after opening."""
    keys = Keys()
    entry = keys.land(b"old")
    keys.now_ms += 2 * WINDOW_MS
    keys.idempotency.land([entry])
    assert len(keys.idempotency) == 0
    assert keys.idempotency.size_bytes == 0


def test_an_unknown_uuid_is_judged_by_its_age() -> None:
    """An unknown UUID of version 7 that is older than the window is refused, a younger one is new.

    One that is years old is taken for random bytes.
    """
    keys = Keys()
    for made_ms, expected in (
        (START_MS + 10, "new"),
        (START_MS - WINDOW_MS + 1, "new"),
        (START_MS - WINDOW_MS, "expired"),
        (START_MS - YEAR_MS, "expired"),
        (START_MS - 2 * YEAR_MS, "new"),
        (0, "new"),
    ):
        assert keys.state_of(uuid7(made_ms)) == expected, made_ms


@pytest.mark.parametrize(
    "key",
    [
        uuid7(OLD_MS, version=4),
        uuid7(OLD_MS, variant=0b11),
        uuid7(OLD_MS, variant=0b01),
        uuid7(OLD_MS) + b"x",
        uuid7(OLD_MS)[:15],
    ],
)
def test_only_uuids_of_version_7_have_an_age(key: bytes) -> None:
    """A key of another version, variant or length is never too old."""
    assert Keys().state_of(key) == "new"


def test_age_is_that_of_the_key_that_the_client_has_chosen() -> None:
    """The key of a principal, a hash, is judged by the age of what the client has chosen."""
    keys, old = Keys(), uuid7(OLD_MS)
    key = key_of_principal(old, "token:alice", has_policy=True)
    assert keys.state_of(key) == "new"
    with pytest.raises(KeyExpired):
        keys.idempotency.find(key, HASH, chosen=old)
    keys.land(key)
    assert keys.idempotency.find(key, HASH, chosen=old) is not None


NAMES = st.sampled_from(["", "token:a", "token:ab", "uri:spiffe://example.org/a"])
CHOSEN = st.sampled_from([b"", b"b", b"key", bytes(63), bytes(64)])


@given(one=st.tuples(NAMES, CHOSEN), other=st.tuples(NAMES, CHOSEN), has_policy=st.booleans())
def test_nobody_has_the_key_of_another(
    one: tuple[str, bytes], other: tuple[str, bytes], *, has_policy: bool
) -> None:
    """Keys are the same only for the same principal and the same choice, with or without a policy;
    what the anonymous choose is never the key of a principal once there is a policy.
    """
    found = {key_of_principal(chosen, name, has_policy=has_policy) for name, chosen in (one, other)}
    assert len(found) == len({one, other})
    name, chosen = one
    if name:
        key = key_of_principal(chosen, name, has_policy=has_policy)
        assert key == key_of_principal(chosen, name, has_policy=not has_policy)
        assert key_of_principal(key, "", has_policy=True) != key


@pytest.mark.parametrize("chosen", [b"k", uuid7(START_MS), bytes(63)])
def test_keys_of_the_anonymous_are_those_of_earlier_versions(chosen: bytes) -> None:
    """What the anonymous choose is the key, with a policy as well if it has not 64 bytes."""
    assert {key_of_principal(chosen, "", has_policy=each) for each in (False, True)} == {chosen}
    assert key_of_principal(bytes(64), "", has_policy=False) == bytes(64)


def test_hash_of_a_principal_is_for_ever() -> None:
    """The hash never changes, since records outlive the server that wrote them."""
    data = b"\x07\0\0\0token:a" + b"key"
    wanted = hashlib.blake2b(data, digest_size=64, person=b"shalekv once").digest()
    assert key_of_principal(b"key", "token:a", has_policy=True) == wanted


def test_request_that_was_abandoned_is_new_again() -> None:
    """A request that could not be submitted has not used its key."""
    keys = Keys()
    keyed = KeyedRequest(b"k", HASH, 0, ReplyKind.PUT, lambda _: b"")
    pending = keys.idempotency.begin(keyed, lambda _: None)
    assert keys.idempotency.find(b"k", HASH) is pending
    keys.idempotency.abandon(keyed)
    assert keys.state_of(b"k") == "new"


def test_record_is_remembered_before_calls_are_answered() -> None:
    """A caller that retries on hearing of its commit finds it done; a lost one is forgotten."""
    keys, found = Keys(), list[str]()
    record = keys.land(b"other")._replace(key=record_key(b"k"))
    for outcome, expected in (
        (Stopping("lost"), "new"),
        (Receipt(7, 1, record=record), "remembered"),
    ):
        keyed = KeyedRequest(b"k", HASH, 0, ReplyKind.PUT, lambda _: b"")
        pending = keys.idempotency.begin(keyed, lambda _: found.append(keys.state_of(b"k")))
        assert keys.state_of(b"k") == "pending"
        pending.settle(outcome)
        assert found[-1] == keys.state_of(b"k") == expected


def test_deleted_record_is_forgotten() -> None:
    """A tombstone removes its record and the bytes of it."""
    keys = Keys()
    entry = keys.land(b"k")
    keys.idempotency.land([entry._replace(seq=8, kind=Kind.TOMBSTONE, value=b"")])
    assert keys.state_of(b"k") == "new"
    assert (len(keys.idempotency), keys.idempotency.size_bytes) == (0, 0)


@given(landings=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 700), st.binary(max_size=5))))
def test_memory_is_that_of_two_windows(landings: list[tuple[int, int, bytes]]) -> None:
    """Each landing drops what expired a window ago; the rest is accounted, each key once."""
    keys, known = Keys(), dict[bytes, Entry]()
    for number, passed_ms, reply in landings:
        keys.now_ms += passed_ms
        key = b"%d" % number
        known[key] = keys.land(key, reply=reply)
        known = {
            key: entry
            for key, entry in known.items()
            if entry.expire_at_ms > keys.now_ms - WINDOW_MS
        }
        assert len(keys.idempotency) == len(known)
        assert keys.idempotency.size_bytes == entries_bytes([*known.values()])
        found = keys.idempotency.find(key, HASH)
        assert isinstance(found, AppliedRequest)
        assert found.record.reply == reply
