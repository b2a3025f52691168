"""The access policy as messages, and as stored objects: each version is one, in an envelope."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from shalekv.errors import UnsupportedVersion, WrongObject
from shalekv.format.envelope import Envelope
from shalekv.format.names import UUID_BYTES, parse_policy_name
from shalekv.protocol.access import (
    ALL_KEYS,
    LIMIT_MAX,
    SECRET_BYTES,
    Grant,
    Policy,
    Quota,
    Role,
    Rule,
    Verb,
)
from shalekv.protocol.entry import KeyRange, prefix_end
from shalekv.v1 import access_pb2, kv_pb2

POLICY_FORMAT_VERSION = 1
ENVELOPE = Envelope(b"ShaleAcc", POLICY_FORMAT_VERSION)

_VERBS = {
    Verb.READ: access_pb2.ACCESS_VERB_READ,
    Verb.WRITE: access_pb2.ACCESS_VERB_WRITE,
    Verb.DELETE_RANGE: access_pb2.ACCESS_VERB_DELETE_RANGE,
    Verb.WATCH: access_pb2.ACCESS_VERB_WATCH,
    Verb.INGEST: access_pb2.ACCESS_VERB_INGEST,
    Verb.ADMIN: access_pb2.ACCESS_VERB_ADMIN,
}
_VERB_OF = {int(number): verb for verb, number in _VERBS.items()}
_LIMITS = tuple(access_pb2.AccessQuota.DESCRIPTOR.fields_by_name)


class UnknownVerb(ValueError):
    """A rule has a verb of a later version."""


def policy_message(policy: Policy) -> access_pb2.AccessPolicy:
    """Encode a policy, without its secret."""
    return access_pb2.AccessPolicy(
        version=policy.version,
        enforced=policy.is_enforced,
        roles=[
            access_pb2.AccessRole(name=role.name, rules=map(rule_message, role.rules))
            for role in policy.roles
        ],
        grants=[
            access_pb2.AccessGrant(
                subject=grant.subject,
                roles=grant.roles,
                quota=None if grant.quota == Quota() else quota_message(grant.quota),
            )
            for grant in policy.grants
        ],
    )


def rule_message(rule: Rule) -> access_pb2.AccessRule:
    """Encode a rule; all keys are no range."""
    keys = None if rule.keys == ALL_KEYS else kv_pb2.KeyRange(start=rule.keys[0], end=rule.keys[1])
    verbs = [number for verb, number in _VERBS.items() if verb in rule.verbs]
    return access_pb2.AccessRule(verbs=verbs, range=keys)


def quota_message(quota: Quota) -> access_pb2.AccessQuota:
    """Encode a quota."""
    return access_pb2.AccessQuota(**{name: getattr(quota, name) for name in _LIMITS})


def policy_of(message: access_pb2.AccessPolicy, secret: bytes = b"") -> Policy:
    """Decode a policy, which may break the rules of `check_policy`.

    `ValueError` names the field that means nothing; `UnknownVerb` is one.
    """
    return Policy(
        version=message.version,
        is_enforced=message.enforced,
        roles=tuple(_role_of(f"roles[{at}]", role) for at, role in enumerate(message.roles)),
        grants=tuple(_grant_of(f"grants[{at}]", grant) for at, grant in enumerate(message.grants)),
        secret=secret,
    )


def _role_of(path: str, message: access_pb2.AccessRole) -> Role:
    rules = enumerate(message.rules)
    return Role(message.name, tuple(_rule_of(f"{path}.rules[{at}]", rule) for at, rule in rules))


def _rule_of(path: str, message: access_pb2.AccessRule) -> Rule:
    for number in message.verbs:
        if number not in _VERB_OF:
            raise UnknownVerb(f"{path}.verbs: {number} is unknown")
    keys = KeyRange(message.range.start, message.range.end)
    if message.range.prefix:
        if keys != ALL_KEYS:
            raise ValueError(f"{path}.range.prefix: a prefix excludes start and end")
        keys = KeyRange(message.range.prefix, prefix_end(message.range.prefix))
    return Rule(frozenset(_VERB_OF[number] for number in message.verbs), keys)


def _grant_of(path: str, message: access_pb2.AccessGrant) -> Grant:
    for name in _LIMITS:
        if getattr(message.quota, name) > LIMIT_MAX:
            raise ValueError(f"{path}.quota.{name}: is above {LIMIT_MAX}")
    quota = Quota(**{name: getattr(message.quota, name) for name in _LIMITS})
    return Grant(message.subject, tuple(message.roles), quota)


def encode_policy(policy: Policy, *, database_id: bytes, write_id: bytes) -> bytes:
    """Return the object that holds this version. `write_id`: 16 random bytes, of this object."""
    message = access_pb2.StoredAccessPolicy(
        database_id=database_id,
        write_id=write_id,
        secret=policy.secret,
        policy=policy_message(policy),
    )
    return ENVELOPE.seal(message.SerializeToString(deterministic=True))


def decode_policy(name: str, data: bytes, *, database_id: bytes | None) -> Policy:
    """Return the policy in `data`, the bytes of the object `name`.

    Raises a `CorruptObject`: `WrongObject` if it is intact, but another version, or belongs to
    another database than `database_id`, unless that is None.
    """
    piece = ENVELOPE.unseal(name, data)
    message = access_pb2.StoredAccessPolicy()
    try:
        message.ParseFromString(piece.data)
        # A later change writes the whole policy: a field that is unknown here would be lost.
        message.DiscardUnknownFields()
        if message.ByteSize() != len(piece.data):
            problem = "the message has fields that are for a later version"
            raise UnsupportedVersion(name, piece.offset, problem)
        policy = policy_of(message.policy, message.secret)
    except UnknownVerb as error:
        raise UnsupportedVersion(name, piece.offset, str(error)) from error
    except (DecodeError, ValueError) as error:
        raise piece.malformed(0, f"the message is malformed: {error}") from error
    lengths = {
        "database_id": (message.database_id, UUID_BYTES),
        "write_id": (message.write_id, UUID_BYTES),
        "secret": (message.secret, SECRET_BYTES),
    }
    for field, (value, expected) in lengths.items():
        if len(value) != expected:
            raise piece.malformed(0, f"{field}: has {len(value)} bytes, expected {expected}")
    if policy.version != parse_policy_name(name):
        raise WrongObject(name, piece.offset, f"these are the bytes of version {policy.version}")
    if database_id not in (None, message.database_id):
        problem = f"belongs to database {message.database_id.hex()}"
        raise WrongObject(name, piece.offset, problem)
    return policy
