"""An access policy is decoded as it was encoded, or refused with a typed error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shalekv.errors import (
    BadChecksum,
    BadMagic,
    BadStructure,
    CorruptObject,
    Truncated,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.format.access import ENVELOPE, decode_policy, encode_policy, policy_message, policy_of
from shalekv.format.names import MAX_ID, parse_policy_name, policy_name
from shalekv.protocol.access import ALL_KEYS, LIMIT_MAX, check_policy
from shalekv.protocol.entry import KeyRange
from shalekv.v1 import access_pb2, kv_pb2
from tests.kit.forging import patched
from tests.kit.policies import POLICY

DATABASE_ID = b"id of a database"
NAME = policy_name(POLICY.version)
DATA = encode_policy(POLICY, database_id=DATABASE_ID, write_id=b"id of this object"[:16])
STORED = access_pb2.StoredAccessPolicy.FromString(DATA[20:])


def test_a_policy_is_decoded_as_it_was_encoded() -> None:
    """With its secret in the object, and without it as a message."""
    check_policy(POLICY)
    assert decode_policy(NAME, DATA, database_id=DATABASE_ID) == POLICY
    assert decode_policy(NAME, DATA, database_id=None) == POLICY
    message = policy_message(POLICY)
    assert policy_of(message, POLICY.secret) == POLICY
    assert POLICY.secret not in message.SerializeToString()


def test_a_prefix_becomes_a_range() -> None:
    """And no range becomes all keys."""
    prefix = kv_pb2.KeyRange(prefix=b"a\xff")
    rules = [access_pb2.AccessRule(range=keys) for keys in (prefix, None)]
    roles = [access_pb2.AccessRole(name="a", rules=rules)]
    found = policy_of(access_pb2.AccessPolicy(roles=roles)).roles[0].rules
    assert [rule.keys for rule in found] == [KeyRange(b"a\xff", b"b"), ALL_KEYS]


def changed(change: Callable[[access_pb2.StoredAccessPolicy], object]) -> bytes:
    """The object with another message, and checksums that match."""
    message = access_pb2.StoredAccessPolicy()
    message.CopyFrom(STORED)
    change(message)
    return ENVELOPE.seal(message.SerializeToString())


def with_unknown_field(message: access_pb2.StoredAccessPolicy) -> None:
    message.policy.roles[0].MergeFromString(b"\xf8\x07\x01")


def with_a_later_verb(message: access_pb2.StoredAccessPolicy) -> None:
    message.policy.roles[0].rules[0].verbs.append(99)  # type: ignore[arg-type] # of a later version


def with_a_prefix_and_a_bound(message: access_pb2.StoredAccessPolicy) -> None:
    message.policy.roles[0].rules[0].range.prefix = b"a"


def with_a_large_limit(message: access_pb2.StoredAccessPolicy) -> None:
    message.policy.grants[0].quota.watches = LIMIT_MAX + 1


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        (DATA[:19], Truncated, "checksum"),
        (DATA[:-1], Truncated, f"has {len(DATA) - 1} bytes"),
        (patched(DATA, 0, b"X"), BadMagic, "ShaleAcc"),
        (patched(DATA, 30, b"\0"), BadChecksum, "expected 0x"),
        (ENVELOPE.seal(b"\xff"), BadStructure, "malformed"),
        (changed(with_unknown_field), UnsupportedVersion, "fields that are for a later version"),
        (changed(with_a_later_verb), UnsupportedVersion, "99 is unknown"),
        (changed(with_a_prefix_and_a_bound), BadStructure, "excludes start and end"),
        (changed(with_a_large_limit), BadStructure, "quota.watches: is above"),
        (changed(lambda m: setattr(m, "secret", b"short")), BadStructure, "secret: has 5 bytes"),
        (changed(lambda m: setattr(m, "database_id", b"")), BadStructure, "database_id: has 0"),
        (changed(lambda m: setattr(m, "write_id", b"")), BadStructure, "write_id: has 0"),
        (changed(lambda m: setattr(m.policy, "version", 8)), WrongObject, "of version 8"),
        (
            changed(lambda m: setattr(m, "database_id", b"another database")),
            WrongObject,
            "belongs to database",
        ),
    ],
)
def test_a_wrong_object_is_refused(data: bytes, error: type[CorruptObject], problem: str) -> None:
    """The error names the object, and what is wrong with it."""
    with pytest.raises(error, match=problem) as refused:
        decode_policy(NAME, data, database_id=DATABASE_ID)
    assert refused.value.name == NAME


def test_names_are_parsed_as_they_are_built() -> None:
    """And nothing else is the name of a policy."""
    for version in (1, 7, MAX_ID):
        assert parse_policy_name(policy_name(version)) == version
    for other in ("access/7.policy", f"{NAME}.x", f"x{NAME}", NAME.replace("0", "\u0660")):
        assert parse_policy_name(other) is None
