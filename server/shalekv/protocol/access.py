"""Access control: principals, roles, grants, and the one decision about an operation. Pure.

A policy grants roles to subjects. A subject is the name of a principal, a name that its certificate
or token also proves, `authenticated` (every principal that is known), or `anonymous` (everybody). A
role is a list of rules, each of which allows some verbs on a range of keys.

`permissions_of` collects what the roles of a principal allow, and `Permissions.allow` is the
decision. What an operation needs is said by `shalekv.server.access.needs`, and asked in one place,
`shalekv.server.access.guard`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from shalekv.errors import InvalidRequest
from shalekv.protocol.entry import KEY_BYTES_MAX, KeyRange, coalesced

AUTHENTICATED, ANYBODY = "authenticated", "anonymous"
ROOT = "root"  # a role that every policy has: all verbs on all keys
ALL_KEYS = KeyRange(b"", b"")
SECRET_BYTES = 32

ROLES_MAX = 1_000
GRANTS_MAX = 10_000
RULES_MAX = 10_000  # of all roles together
ROLES_OF_GRANT_MAX = 100
NAME_CHARS_MAX = 128
SUBJECT_CHARS_MAX = 1_024
LIMIT_MAX = 2**63 - 1  # of a quota

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/@-]{{0,{NAME_CHARS_MAX - 1}}}")
_KINDS = ("token", "uri", "dns", "cn", "oidc", "claim")
SUBJECT_FORMS = (
    "token:NAME, uri:URI, dns:NAME, cn:NAME, oidc:SUBJECT, claim:NAME=VALUE, "
    f"{AUTHENTICATED} or {ANYBODY}"
)


class Verb(StrEnum):
    """Kind of operation that a rule allows."""

    READ = "read"
    WRITE = "write"
    DELETE_RANGE = "delete_range"
    WATCH = "watch"
    INGEST = "ingest"
    ADMIN = "admin"

    __hash__ = str.__hash__  # that of an enum is not written in C


@dataclass(frozen=True, slots=True)
class Principal:
    """The name of a caller, as far as credentials prove it.

    `name` begins with its kind: `token:NAME`, `uri:URI`, `dns:NAME`, `cn:NAME` (of a certificate)
    or `oidc:SUBJECT`. `others` are further subjects that the same credentials prove, such as
    `claim:groups=ops`.
    """

    name: str
    others: frozenset[str] = frozenset()


ANONYMOUS = Principal("")


def subjects_of(principal: Principal) -> frozenset[str]:
    """Return all subjects whose grants are the principal's."""
    if not principal.name:
        return frozenset((ANYBODY,))
    return principal.others | {principal.name, AUTHENTICATED, ANYBODY}


class Need(NamedTuple):
    """Need of an operation: a verb on all keys of a range."""

    verb: Verb
    keys: KeyRange = ALL_KEYS


@dataclass(frozen=True, slots=True)
class Rule:
    """Verbs that are allowed on the keys of a range. ADMIN has no keys: its range is ALL_KEYS."""

    verbs: frozenset[Verb]
    keys: KeyRange = ALL_KEYS


@dataclass(frozen=True, slots=True)
class Role:
    """A named list of rules."""

    name: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of what a principal uses of one process; 0: no limit."""

    calls_per_s: int = 0
    bytes_per_s: int = 0  # of requests and replies
    calls_in_flight: int = 0
    bytes_in_flight: int = 0  # of requests that are not answered
    watches: int = 0
    scans: int = 0
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Roles that a subject gets, and a quota for each principal that has the subject."""

    subject: str
    roles: tuple[str, ...] = ()
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of a database. Version 0: none was stored yet.

    While `is_enforced` is False every operation is allowed to everybody. `secret` seals what
    clients get to hand back, such as page tokens; all processes of the database have the same.
    """

    version: int = 0
    is_enforced: bool = False
    roles: tuple[Role, ...] = ()
    grants: tuple[Grant, ...] = ()
    secret: bytes = field(default=b"", repr=False)


class Permissions:
    """Verbs and ranges of keys that the roles of one principal allow.

    For each verb there are the bounds of its ranges of keys, which neither overlap nor touch:
    start, end, start, end, ..., without the last end if the last range has none. So a key is in a
    range if the number of bounds up to it is odd.
    """

    __slots__ = ("_bounds",)

    def __init__(self, ranges: Mapping[Verb, Iterable[KeyRange]]) -> None:
        """`ranges` are those in which each verb is allowed, in any order."""
        self._bounds = {verb: _bounds(ranges.get(verb, ())) for verb in Verb}

    @property
    def is_empty(self) -> bool:
        """Return whether nothing at all is allowed."""
        return not any(self._bounds.values())

    def allow(self, need: Need) -> bool:
        """Return whether all keys of the need are in ranges in which the verb is allowed.

        A range without a key counts as its first key: it is no way around the rules.
        """
        start, end = need.keys
        bounds = self._bounds[need.verb]
        at = bisect_right(bounds, start)
        if not at & 1:
            return False
        return at == len(bounds) or (bool(end) and end <= bounds[at])

    def rules(self) -> tuple[Rule, ...]:
        """Return the fewest rules that allow the same: one for each range and its verbs."""
        verbs: dict[KeyRange, list[Verb]] = {}
        for verb, bounds in self._bounds.items():
            ends = (*bounds[1::2], b"")
            for start, end in zip(bounds[::2], ends, strict=False):
                verbs.setdefault(KeyRange(start, end), []).append(verb)
        return tuple(Rule(frozenset(verbs[keys]), keys) for keys in sorted(verbs))


def _bounds(ranges: Iterable[KeyRange]) -> Sequence[bytes]:
    bounds: list[bytes] = []
    for start, end in coalesced([keys for keys in ranges if not keys.is_empty]):
        bounds += (start, end) if end else (start,)
    return bounds


EVERYTHING = Permissions(dict.fromkeys(Verb, (ALL_KEYS,)))


def permissions_of(policy: Policy, principal: Principal) -> Permissions:
    """Collect what the policy allows the principal; everything, if it is not enforced."""
    if not policy.is_enforced:
        return EVERYTHING
    subjects = subjects_of(principal)
    names = {name for grant in policy.grants if grant.subject in subjects for name in grant.roles}
    if ROOT in names:
        return EVERYTHING
    ranges: dict[Verb, list[KeyRange]] = {verb: [] for verb in Verb}
    for role in policy.roles:
        for rule in role.rules if role.name in names else ():
            for verb in rule.verbs:
                ranges[verb].append(rule.keys)
    return Permissions(ranges)


def quota_of(policy: Policy, principal: Principal) -> Quota:
    """Return the smallest limit of each kind that the grants of the principal set."""
    if not policy.is_enforced:
        return Quota()
    subjects = subjects_of(principal)
    quotas = [grant.quota for grant in policy.grants if grant.subject in subjects]
    limits = {
        kind.name: min(filter(None, (getattr(quota, kind.name) for quota in quotas)), default=0)
        for kind in fields(Quota)
    }
    return Quota(**limits)


def check_policy(policy: Policy) -> None:
    """Check a policy that is to be stored. Raises `InvalidRequest` with the path of the field."""
    _check_count("policy.roles", len(policy.roles), ROLES_MAX)
    _check_count("policy.grants", len(policy.grants), GRANTS_MAX)
    _check_count("policy.roles", sum(len(role.rules) for role in policy.roles), RULES_MAX, "rules")
    for at, role in enumerate(policy.roles):
        _check_role(f"policy.roles[{at}]", role)
    names = {ROOT, *(role.name for role in policy.roles)}
    _check_distinct("policy.roles", "name", [role.name for role in policy.roles])
    for at, grant in enumerate(policy.grants):
        _check_grant(f"policy.grants[{at}]", grant, names)
    _check_distinct("policy.grants", "subject", [grant.subject for grant in policy.grants])


def check_subject(field_path: str, subject: str) -> None:
    """Check the form of a subject. Raises `InvalidRequest`."""
    kind, _, rest = subject.partition(":")
    is_known = subject in (AUTHENTICATED, ANYBODY) or (kind in _KINDS and rest != "")
    if kind == "claim":
        is_known = rest.find("=") > 0
    if not is_known:
        raise InvalidRequest(field_path, f"{subject!r} is not a subject: {SUBJECT_FORMS}")
    if not subject.isprintable() or subject != subject.strip():
        problem = f"{subject!r} has a control character, or a blank at its end"
        raise InvalidRequest(field_path, problem)
    if len(subject) > SUBJECT_CHARS_MAX:
        raise InvalidRequest(field_path, f"has more than {SUBJECT_CHARS_MAX} characters")


def _check_role(path: str, role: Role) -> None:
    if _NAME.fullmatch(role.name) is None:
        raise InvalidRequest(
            f"{path}.name",
            f"{role.name!r} is not the name of a role: at most {NAME_CHARS_MAX} of A-Z, a-z, 0-9 "
            "and ._:/@-, and a letter or digit first",
        )
    if role.name == ROOT:
        raise InvalidRequest(f"{path}.name", f"every policy has the role {ROOT!r} already")
    for at, rule in enumerate(role.rules):
        _check_rule(f"{path}.rules[{at}]", rule)


def _check_rule(path: str, rule: Rule) -> None:
    if not rule.verbs:
        raise InvalidRequest(f"{path}.verbs", "a rule has at least one verb")
    if Verb.ADMIN in rule.verbs and rule.keys != ALL_KEYS:
        raise InvalidRequest(f"{path}.range", f"the verb {Verb.ADMIN!s} has no range of keys")
    if rule.keys.is_empty:
        raise InvalidRequest(f"{path}.range", "the range has no keys: its end is not above start")
    if max(len(bound) for bound in rule.keys) > KEY_BYTES_MAX:
        raise InvalidRequest(f"{path}.range", f"a key has at most {KEY_BYTES_MAX} bytes")


def _check_grant(path: str, grant: Grant, names: set[str]) -> None:
    check_subject(f"{path}.subject", grant.subject)
    _check_count(f"{path}.roles", len(grant.roles), ROLES_OF_GRANT_MAX)
    _check_distinct(f"{path}.roles", "name", grant.roles)
    for name in grant.roles:
        if name not in names:
            raise InvalidRequest(f"{path}.roles", f"there is no role {name!r}")
    for kind in fields(Quota):
        if not 0 <= getattr(grant.quota, kind.name) <= LIMIT_MAX:
            raise InvalidRequest(f"{path}.quota.{kind.name}", f"is not in 0..{LIMIT_MAX}")


def _check_count(path: str, count: int, most: int, what: str = "elements") -> None:
    if count > most:
        raise InvalidRequest(path, f"has {count} {what}, {most} at most")


def _check_distinct(path: str, what: str, values: Sequence[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise InvalidRequest(path, f"the {what} {value!r} is there twice")
        seen.add(value)
