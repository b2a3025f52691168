"""Snapshots, loads, the access policy and counts of requests: values, and their messages.

`shalekv_client.calls.AdminCalls` imports this when one of its calls is made.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from shalekv.v1 import access_pb2, admin_pb2, kv_pb2
from shalekv_client.operations import ADMIN, Method
from shalekv_client.results import View, known, view_of

ID_BYTES = 16
CREATE_SNAPSHOT = Method(
    f"/{ADMIN}/CreateSnapshot", admin_pb2.CreateSnapshotRequest, admin_pb2.CreateSnapshotReply
)
RENEW_SNAPSHOT = Method(
    f"/{ADMIN}/RenewSnapshot", admin_pb2.RenewSnapshotRequest, admin_pb2.RenewSnapshotReply
)
LIST_SNAPSHOTS = Method(
    f"/{ADMIN}/ListSnapshots", admin_pb2.ListSnapshotsRequest, admin_pb2.ListSnapshotsReply
)
DELETE_SNAPSHOT = Method(
    f"/{ADMIN}/DeleteSnapshot", admin_pb2.DeleteSnapshotRequest, admin_pb2.DeleteSnapshotReply
)
WHO_AM_I = Method(f"/{ADMIN}/WhoAmI", admin_pb2.WhoAmIRequest, admin_pb2.WhoAmIReply)
GET_POLICY = Method(
    f"/{ADMIN}/GetAccessPolicy", admin_pb2.GetAccessPolicyRequest, admin_pb2.GetAccessPolicyReply
)
SET_POLICY = Method(
    f"/{ADMIN}/SetAccessPolicy", admin_pb2.SetAccessPolicyRequest, admin_pb2.SetAccessPolicyReply
)
INGEST = Method(f"/{ADMIN}/IngestSst", admin_pb2.IngestSstRequest, admin_pb2.IngestSstReply)
PROFILE = Method(f"/{ADMIN}/Profile", admin_pb2.ProfileRequest, admin_pb2.ProfileReply)
PROFILE_FORMAT = admin_pb2.ProfileFormat.ValueType
SLOW_CALLS = Method(
    f"/{ADMIN}/ListSlowCalls", admin_pb2.ListSlowCallsRequest, admin_pb2.ListSlowCallsReply
)
STATS = Method(f"/{ADMIN}/Stats", admin_pb2.StatsRequest, admin_pb2.StatsReply)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the database that is kept. Any server of the database can read it."""

    id: bytes  # 16 bytes: the argument `at` of reads
    name: str  # empty: none
    manifest_id: int  # the manifest that it pins
    expire_time_s: int  # seconds since the Unix epoch, by the clock of the store; 0: never
    seq: int  # the last commit that it includes


@dataclass(frozen=True, slots=True)
class Ingested:
    """A load that is committed."""

    seq: int  # of the whole load; for a batch of a stream it may be that of a later batch
    wal_id: int | None  # the WAL object that commits it; None: it was committed before
    already_applied: bool  # it had been committed before: this call changed nothing


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


def snapshot_of(info: admin_pb2.SnapshotInfo) -> Snapshot:
    """Decode the snapshot of a reply."""
    return Snapshot(info.id, info.name, info.manifest_id, info.expire_time_s, info.seq)


def name_snapshot(
    request: admin_pb2.RenewSnapshotRequest | admin_pb2.DeleteSnapshotRequest, called: bytes | str
) -> None:
    """Put the id or the name of a snapshot into a request."""
    if isinstance(called, bytes):
        request.id = called
    else:
        request.name = called


def caller_of(reply: admin_pb2.WhoAmIReply) -> CallerAccess:
    """Decode who the caller is."""
    return CallerAccess(
        reply.principal,
        tuple(reply.subjects),
        tuple(map(_rule_of, reply.rules)),
        _quota_of(reply.quota),
        reply.enforced,
        reply.expires_at_ms,
    )


def ingested_of(reply: admin_pb2.IngestSstReply) -> Ingested:
    """Decode the load that a reply acknowledges."""
    header = reply.header
    wal_id = header.wal_id if header.HasField("wal_id") else None
    return Ingested(header.seq, wal_id, reply.already_applied)


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


def policy_message(policy: AccessPolicy) -> access_pb2.AccessPolicy:
    """Encode a policy as a message. Raises ValueError for a verb that this client does not know."""
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


class ProfileFormat(enum.Enum):
    """Format of a profile. The numbers are those of the protocol."""

    TEXT = 1  # a tree for a terminal
    HTML = 2  # a page for a browser
    SPEEDSCOPE = 3  # JSON for https://www.speedscope.app


@dataclass(frozen=True, slots=True)
class Profile:
    """Functions in which a server has spent its time."""

    view: View
    text: str  # in the format that was asked for
    samples: int  # that it is made of
    # Numbers of processes that have given none, of several that share a port.
    missing_processes: tuple[int, ...] = ()


def profile_of(reply: admin_pb2.ProfileReply) -> Profile:
    """Decode the reply to `Client.profile`."""
    missing = tuple(reply.missing_processes)
    return Profile(view_of(reply.header), reply.profile, reply.samples, missing)


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A request to the object store that a slow call has waited for."""

    operation: str  # such as "create"
    name: str  # of the object, or the folder
    duration_ms: float  # attempts that failed included
    attempts: int
    problem: str  # of the last attempt that failed; empty: none has


@dataclass(frozen=True, slots=True)
class SlowCall:
    """A call that took long, and what it has waited for."""

    ended_at_ms: int  # by the clock of the server, since the Unix epoch
    method: str  # such as "KV.Put" or "Session.put"
    code: str  # of its status, such as "OK"
    duration_ms: float
    waited_for: str  # in words: a request to the object store, or a stage
    stages_ms: Mapping[str, float]  # where the time went, by stage
    requests: tuple[SlowRequest, ...]  # that it has waited for, the slowest first
    wal_id: int | None  # the WAL object of its commit; None: it has none
    group_commits: int  # commits that have waited for the same object, this one included
    key_hash: str  # of its first key, as in the audit log; empty: it has none
    principal: str  # empty: anonymous
    peer: str
    request_id: str  # empty: the caller has sent none
    trace_id: str  # empty: it has none
    process: int = 0  # that has answered it, of several that share a port; 0: there is one


@dataclass(frozen=True, slots=True)
class SlowCalls:
    """The slow calls that a server has kept, the newest first."""

    view: View
    slow_ms: int  # the time from which on a call is slow; 0: none is
    calls: tuple[SlowCall, ...]
    # Numbers of processes that have not answered in time: their calls are missing.
    missing_processes: tuple[int, ...] = ()


def slow_calls_of(reply: admin_pb2.ListSlowCallsReply) -> SlowCalls:
    """Decode the reply to `Client.slow_calls`."""
    calls = tuple(map(_slow_call, reply.calls))
    missing = tuple(reply.missing_processes)
    return SlowCalls(view_of(reply.header), reply.slow_ms, calls, missing)


def _slow_call(message: admin_pb2.SlowCall) -> SlowCall:
    return SlowCall(
        ended_at_ms=message.ended_at_ms,
        method=message.method,
        code=message.code,
        duration_ms=message.duration_ms,
        waited_for=message.waited_for,
        stages_ms={stage.name: stage.duration_ms for stage in message.stages},
        requests=tuple(
            SlowRequest(each.operation, each.name, each.duration_ms, each.attempts, each.problem)
            for each in message.requests
        ),
        wal_id=message.wal_id if message.HasField("wal_id") else None,
        group_commits=message.group_commits,
        key_hash=message.key_hash,
        principal=message.principal,
        peer=message.peer,
        request_id=message.request_id,
        trace_id=message.trace_id,
        process=message.process,
    )


class RequestKind(enum.Enum):
    """The price class of a request to a store. The numbers are those of the protocol."""

    WRITE = 1  # a put, a copy; the beginning, a part or the end of an upload
    LIST = 2  # a page
    READ = 3  # a get or a head
    DELETE = 4
    RECORD_WRITE = 5  # in the transactional store
    RECORD_READ = 6


@dataclass(frozen=True, slots=True)
class ProcessRequests:
    """Requests sent by one process, and by those that had its role before it."""

    role: str  # "writer", "reader", "compactor" or "collector"
    uptime_ms: int  # since the server has started the role, restarts included
    requests: Mapping[RequestKind, int]  # of every kind that this client knows


class CostDimension(enum.Enum):
    """How the calls of a server are divided to tell what they have cost."""

    METHOD = 1
    PRINCIPAL = 2
    PREFIX = 3  # of the first key: up to its first `/` or `:`


@dataclass(frozen=True, slots=True)
class OriginCost:
    """Cost of the calls of one method, principal or prefix since the server began."""

    dimension: CostDimension
    name: str  # "background": no call has caused it; "other": those with little
    calls: int  # by prefix an estimate
    requests: Mapping[RequestKind, int]  # of every kind that this client knows
    dollars: float | None  # in US dollars; None: prices are not known


@dataclass(frozen=True, slots=True)
class Stats:
    """The requests to the object store, process by process."""

    view: View
    url: str  # of the database, without credentials
    endpoint: str  # HOST:PORT of the store; empty: that of the provider
    records: str  # the kind of the transactional store, such as "dynamodb"; empty: none
    processes: tuple[ProcessRequests, ...]
    origins: tuple[OriginCost, ...] = ()  # of the process that has answered
    # The prices, as far as the server knows them, in US dollars for 1,000 requests.
    usd_per_1000: Mapping[RequestKind, float] = field(default_factory=dict)


def stats_of(reply: admin_pb2.StatsReply) -> Stats:
    """Decode the reply to `Client.stats`."""
    return Stats(
        view=view_of(reply.header),
        url=reply.url,
        endpoint=reply.endpoint,
        records=reply.records,
        processes=tuple(map(_process, reply.processes)),
        origins=tuple(filter(None, map(_origin, reply.origins))),
        usd_per_1000={
            _KINDS[name]: dollars for name, dollars in reply.usd_per_1000.items() if name in _KINDS
        },
    )


def _process(message: admin_pb2.ProcessRequests) -> ProcessRequests:
    requests = _requests(message.requests)
    return ProcessRequests(message.role, message.uptime_ms, requests)


def _origin(message: admin_pb2.OriginCost) -> OriginCost | None:
    """Decode what an origin has cost; None: a newer server has more dimensions."""
    dimension = known(CostDimension, message.dimension)
    if dimension is None:
        return None
    dollars = message.dollars if message.HasField("dollars") else None
    requests = _requests(message.requests)
    return OriginCost(dimension, message.name, message.calls, requests, dollars)


def _requests(counts: Iterable[admin_pb2.RequestCount]) -> Mapping[RequestKind, int]:
    requests = dict.fromkeys(RequestKind, 0)
    for count in counts:
        if count.kind in _NUMBERS:  # a newer server may have more kinds
            requests[RequestKind(count.kind)] += count.requests
    return MappingProxyType(requests)


_NUMBERS = frozenset(kind.value for kind in RequestKind)
_KINDS = {kind.name.lower(): kind for kind in RequestKind}
