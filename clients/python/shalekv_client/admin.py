"""The operator's calls of a client: snapshots, the access policy, and who the caller is."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import TypeVar

from google.protobuf.message import Message

from shalekv.v1 import access_pb2, admin_pb2, kv_pb2
from shalekv_client.operations import ADMIN, Method
from shalekv_client.policies import Destination
from shalekv_client.results import known
from shalekv_client.routing.fleet import Fleet

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)

ID_BYTES = 16
_CREATE = Method(
    f"/{ADMIN}/CreateSnapshot", admin_pb2.CreateSnapshotRequest, admin_pb2.CreateSnapshotReply
)
_RENEW = Method(
    f"/{ADMIN}/RenewSnapshot", admin_pb2.RenewSnapshotRequest, admin_pb2.RenewSnapshotReply
)
_LIST = Method(
    f"/{ADMIN}/ListSnapshots", admin_pb2.ListSnapshotsRequest, admin_pb2.ListSnapshotsReply
)
_DELETE = Method(
    f"/{ADMIN}/DeleteSnapshot", admin_pb2.DeleteSnapshotRequest, admin_pb2.DeleteSnapshotReply
)
_WHO_AM_I = Method(f"/{ADMIN}/WhoAmI", admin_pb2.WhoAmIRequest, admin_pb2.WhoAmIReply)
_GET = Method(
    f"/{ADMIN}/GetAccessPolicy", admin_pb2.GetAccessPolicyRequest, admin_pb2.GetAccessPolicyReply
)
_SET = Method(
    f"/{ADMIN}/SetAccessPolicy", admin_pb2.SetAccessPolicyRequest, admin_pb2.SetAccessPolicyReply
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the database that is kept. Any server of the database can read it."""

    id: bytes  # 16 bytes: the argument `at` of reads
    name: str  # empty: none
    manifest_id: int  # the manifest that it pins
    expire_time_s: int  # seconds since the Unix epoch, by the clock of the store; 0: never
    seq: int  # the last commit that it includes


class AccessVerb(enum.Enum):
    """Kind of operation that a rule allows. The numbers are those of the protocol."""

    READ = 1
    WRITE = 2  # put, delete and add to single keys
    DELETE_RANGE = 3
    WATCH = 4
    INGEST = 5
    ADMIN = 6  # change the policy, manage snapshots, read statistics


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Verbs that are allowed on the keys from `start` on and before `end`; b"": no bound."""

    verbs: frozenset[AccessVerb | None]  # None: one unknown to this client
    start: bytes = b""
    end: bytes = b""
    prefix: bytes = b""  # all keys that begin with it; excludes start and end


@dataclass(frozen=True, slots=True)
class AccessRole:
    """A named list of rules."""

    name: str
    rules: tuple[AccessRule, ...] = ()


@dataclass(frozen=True, slots=True)
class AccessQuota:
    """Limits of what a principal uses of one process; 0: no limit."""

    calls_per_s: int = 0
    bytes_per_s: int = 0
    calls_in_flight: int = 0
    bytes_in_flight: int = 0
    watches: int = 0
    scans: int = 0
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class AccessGrant:
    """Roles that a subject gets, and a quota for each principal that has the subject.

    A subject is the name of a principal, such as "token:ann", or "claim:NAME=VALUE",
    "authenticated" or "anonymous".
    """

    subject: str
    roles: tuple[str, ...] = ()
    quota: AccessQuota = field(default_factory=AccessQuota)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The access policy. `version` 0: none was stored yet."""

    version: int = 0
    is_enforced: bool = False
    roles: tuple[AccessRole, ...] = ()
    grants: tuple[AccessGrant, ...] = ()


@dataclass(frozen=True, slots=True)
class CallerAccess:
    """The caller, as a server knows it, and what it may do."""

    principal: str  # empty: anonymous
    subjects: tuple[str, ...]  # others that its credentials prove
    rules: tuple[AccessRule, ...]
    quota: AccessQuota
    is_enforced: bool  # False: everything is allowed to everybody
    expires_at_ms: int  # of the credentials, milliseconds since 1970; 0: never


class AdminCalls:
    """The calls of a client about snapshots and access. Any server answers them; see `Client`.

    The argument `called` of `renew_snapshot` and `delete_snapshot` is the id (bytes) or the name
    (str) of the snapshot. They raise `SnapshotNotFound` when there is none.
    """

    fleet: Fleet
    _timeout_ms: int

    async def create_snapshot(
        self,
        name: str = "",
        *,
        ttl_s: int = 0,
        forever: bool = False,
        timeout_ms: int | None = None,
    ) -> Snapshot:
        """Keep the present state, which includes everything that was acknowledged before.

        The snapshot expires after `ttl_s` seconds, or is kept `forever`: give one of the two.
        Raises `SnapshotExists` when another snapshot has the name.
        """
        request = admin_pb2.CreateSnapshotRequest(name=name, ttl_s=ttl_s, forever=forever)
        # A repeat would create a second snapshot, or find the name in use by the first.
        reply = await self._ask(_CREATE, request, timeout_ms, is_repeatable=False)
        return snapshot_of(reply.snapshot)

    async def renew_snapshot(
        self,
        called: bytes | str,
        *,
        ttl_s: int = 0,
        forever: bool = False,
        timeout_ms: int | None = None,
    ) -> Snapshot:
        """Let an unexpired snapshot expire `ttl_s` seconds from now, or keep it `forever`."""
        request = admin_pb2.RenewSnapshotRequest(ttl_s=ttl_s, forever=forever)
        _name(request, called)
        reply = await self._ask(_RENEW, request, timeout_ms, is_repeatable=True)
        return snapshot_of(reply.snapshot)

    async def list_snapshots(self, *, timeout_ms: int | None = None) -> list[Snapshot]:
        """Return the snapshots that have not expired, oldest first."""
        request = admin_pb2.ListSnapshotsRequest()
        reply = await self._ask(_LIST, request, timeout_ms, is_repeatable=True)
        return [snapshot_of(each) for each in reply.snapshots]

    async def delete_snapshot(self, called: bytes | str, *, timeout_ms: int | None = None) -> None:
        """Delete a snapshot. The next collection deletes the objects that only it has kept."""
        request = admin_pb2.DeleteSnapshotRequest()
        _name(request, called)
        # A repeat would report that there is none when the first attempt has deleted it.
        await self._ask(_DELETE, request, timeout_ms, is_repeatable=False)

    async def who_am_i(self, *, timeout_ms: int | None = None) -> CallerAccess:
        """Return who this client is for the server. Everybody may ask."""
        reply = await self._ask(
            _WHO_AM_I, admin_pb2.WhoAmIRequest(), timeout_ms, is_repeatable=True
        )
        return CallerAccess(
            reply.principal,
            tuple(reply.subjects),
            tuple(map(_rule_of, reply.rules)),
            _quota_of(reply.quota),
            reply.enforced,
            reply.expires_at_ms,
        )

    async def access_policy(self, *, timeout_ms: int | None = None) -> AccessPolicy:
        """Return the newest access policy. Needs the verb ADMIN."""
        reply = await self._ask(
            _GET, admin_pb2.GetAccessPolicyRequest(), timeout_ms, is_repeatable=True
        )
        return policy_of(reply.policy)

    async def set_access_policy(
        self, policy: AccessPolicy, *, force: bool = False, timeout_ms: int | None = None
    ) -> int:
        """Replace the policy that has the version of `policy`; return the version of the new one.

        Needs the verb ADMIN. `force` stores an enforced policy by which nobody but the
        administrators of the servers' settings, or not this caller, has that verb; without it,
        `InvalidRequest` is raised. Raises `PolicyChanged` if another was stored since.
        """
        reply = await self._ask(
            _SET,
            admin_pb2.SetAccessPolicyRequest(policy=_message(policy), force=force),
            timeout_ms,
            is_repeatable=False,  # a repeat would find the version of the first attempt
        )
        return reply.version

    async def _ask(
        self,
        method: Method[RequestT, ReplyT],
        request: RequestT,
        timeout_ms: int | None,
        *,
        is_repeatable: bool,
    ) -> ReplyT:
        return await self.fleet.unary(
            method,
            request,
            destination=Destination.BY_POLICY,
            is_repeatable=is_repeatable,
            timeout_ms=self._timeout_ms if timeout_ms is None else timeout_ms,
        )


def snapshot_of(info: admin_pb2.SnapshotInfo) -> Snapshot:
    """Decode the snapshot of a reply."""
    return Snapshot(info.id, info.name, info.manifest_id, info.expire_time_s, info.seq)


def _name(
    request: admin_pb2.RenewSnapshotRequest | admin_pb2.DeleteSnapshotRequest, called: bytes | str
) -> None:
    if isinstance(called, bytes):
        request.id = called
    else:
        request.name = called


def policy_of(message: access_pb2.AccessPolicy) -> AccessPolicy:
    """Decode the policy of a reply."""
    return AccessPolicy(
        message.version,
        message.enforced,
        tuple(AccessRole(role.name, tuple(map(_rule_of, role.rules))) for role in message.roles),
        tuple(
            AccessGrant(grant.subject, tuple(grant.roles), _quota_of(grant.quota))
            for grant in message.grants
        ),
    )


def _rule_of(message: access_pb2.AccessRule) -> AccessRule:
    keys = message.range
    verbs = frozenset(known(AccessVerb, number) for number in message.verbs)
    return AccessRule(verbs, keys.start, keys.end, keys.prefix)


def _quota_of(message: access_pb2.AccessQuota) -> AccessQuota:
    return AccessQuota(*(getattr(message, limit.name) for limit in fields(AccessQuota)))


def _message(policy: AccessPolicy) -> access_pb2.AccessPolicy:
    return access_pb2.AccessPolicy(
        version=policy.version,
        enforced=policy.is_enforced,
        roles=[
            access_pb2.AccessRole(name=role.name, rules=map(_rule_message, role.rules))
            for role in policy.roles
        ],
        grants=[
            access_pb2.AccessGrant(
                subject=grant.subject, roles=grant.roles, quota=_quota_message(grant.quota)
            )
            for grant in policy.grants
        ],
    )


def _rule_message(rule: AccessRule) -> access_pb2.AccessRule:
    if None in rule.verbs:
        # Stored without it, the rule would allow less than it did.
        raise ValueError("a rule has a verb that is unknown to this client: use a newer one")
    numbers = sorted(verb.value for verb in rule.verbs if verb is not None)
    keys = kv_pb2.KeyRange(start=rule.start, end=rule.end, prefix=rule.prefix)
    message = access_pb2.AccessRule(range=keys if keys.ByteSize() else None)
    message.verbs.extend(map(access_pb2.AccessVerb.ValueType, numbers))
    return message


def _quota_message(quota: AccessQuota) -> access_pb2.AccessQuota | None:
    if quota == AccessQuota():
        return None
    limits = {limit.name: getattr(quota, limit.name) for limit in fields(AccessQuota)}
    return access_pb2.AccessQuota(**limits)
