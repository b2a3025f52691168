"""Access control: principals, roles, grants, and the one decision about an operation. Pure.

A policy grants roles to subjects. A subject is the name of a principal, a name that its certificate
or token also proves, `authenticated` (every principal that is known), or `anonymous` (everybody). A
role is a list of rules, each of which allows some verbs on a range of keys.

`permissions_of` collects what the roles of a principal allow, and `Permissions.allow` is the
decision. What an operation needs is said by `shalekv.server.access.needs`, and asked in one place,
`shalekv.server.access.guard`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from shalekv.protocol.entry import KeyRange

AUTHENTICATED, ANYBODY = "authenticated", "anonymous"
ROOT = "root"  # a role that every policy has: all verbs on all keys
ALL_KEYS = KeyRange(b"", b"")


class Verb(StrEnum):
    """Kind of operation that a rule allows."""

    READ = "read"
    WRITE = "write"
    DELETE_RANGE = "delete_range"
    WATCH = "watch"
    INGEST = "ingest"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, as far as credentials prove it.

    `name` begins with its kind: `token:NAME`, `uri:URI`, `dns:NAME`, `cn:NAME` (of a certificate)
    or `oidc:SUBJECT`. `others` are further subjects that the same credentials prove, such as
    `claim:groups=ops`.
    """

    name: str
    others: frozenset[str] = frozenset()


ANONYMOUS = Principal("")


@dataclass(frozen=True, slots=True)
class Need:
    """What an operation needs: a verb on all keys of a range."""

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
    """What a principal may use of one process; 0 means without a limit."""

    calls_per_s: int = 0
    bytes_per_s: int = 0  # of requests and replies
    calls_in_flight: int = 0
    bytes_in_flight: int = 0  # of requests that are not answered
    watches: int = 0
    scans: int = 0
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """What a subject gets: roles, and a quota for each principal that has the subject."""

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
    secret: bytes = b""


class Permissions:
    """What the roles of one principal allow."""

    def allow(self, need: Need) -> bool:
        """Return whether all keys of the need are in ranges in which the verb is allowed."""
        raise NotImplementedError


def permissions_of(policy: Policy, principal: Principal) -> Permissions:
    """Collect what the policy allows the principal; everything, if it is not enforced."""
    raise NotImplementedError


def quota_of(policy: Policy, principal: Principal) -> Quota:
    """Return the smallest limit of each kind that the grants of the principal set."""
    raise NotImplementedError
