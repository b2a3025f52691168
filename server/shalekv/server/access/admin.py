"""The calls of `shalekv.v1.Admin` about access, and what a status shows to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import isfinite

from shalekv.errors import InvalidRequest, OutcomeUnknown
from shalekv.format.access import policy_message, policy_of, quota_message, rule_message
from shalekv.protocol.access import ANONYMOUS, EVERYTHING, Need, Policy, Verb, quota_of
from shalekv.server import requests
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.service import Call
from shalekv.v1 import access_pb2, admin_pb2, kv_pb2

CHANGE_TIMEOUT_S = 60.0  # a create is repeated until its outcome is known

_ADMIN = Need(Verb.ADMIN)
_SHOWN_TO_ALL = {"header", "version", "uptime_ms", "wall_ms", "read_readiness", "write_readiness"}


class AccessAdmin:
    """Implements `server.service.AccessService`, for the writer and for readers."""

    def __init__(self, policies: AccessPolicies, header: Callable[[], kv_pb2.ReplyHeader]) -> None:
        """`header` makes the header of a reply."""
        self._policies = policies
        self._header = header

    def who_am_i(self, request: admin_pb2.WhoAmIRequest, call: Call) -> admin_pb2.WhoAmIReply:
        """Tell who the caller is. Raises what is wrong with its credentials, enforced or not."""
        _check(request.header)
        principal, permissions, expires_at_ms = ANONYMOUS, EVERYTHING, 0.0
        policy, caller = self._policies.policy, call.caller
        if caller is not None:
            if caller.problem is not None:
                raise caller.problem
            principal, permissions = caller.identity.principal, caller.permissions
            expires_at_ms = caller.identity.expires_at_ms
        header = self._header()
        if permissions.is_empty:  # a stranger, who need not know how much is written
            header.ClearField("seq")
            header.ClearField("wal_id")
        return admin_pb2.WhoAmIReply(
            header=header,
            principal=principal.name,
            subjects=sorted(principal.others),
            rules=map(rule_message, permissions.rules()),
            quota=quota_message(quota_of(policy, principal)),
            enforced=policy.is_enforced,
            expires_at_ms=int(expires_at_ms) if isfinite(expires_at_ms) else 0,
        )

    async def get_policy(
        self, request: admin_pb2.GetAccessPolicyRequest, call: Call
    ) -> admin_pb2.GetAccessPolicyReply:
        """Return the newest policy in the store, enforced as it counts here."""
        del call
        _check(request.header)
        await self._policies.refresh()
        policy = policy_message(self._policies.shown)
        return admin_pb2.GetAccessPolicyReply(header=self._header(), policy=policy)

    async def set_policy(
        self, request: admin_pb2.SetAccessPolicyRequest, call: Call
    ) -> admin_pb2.SetAccessPolicyReply:
        """Store a policy in place of the version that it has."""
        _check(request.header)
        if not request.HasField("policy"):
            raise InvalidRequest("policy", "is needed")
        policy = _decoded(request.policy)
        principal = ANONYMOUS if call.caller is None else call.caller.identity.principal
        try:
            async with asyncio.timeout(CHANGE_TIMEOUT_S):
                stored = await self._policies.replace(policy, principal, is_forced=request.force)
        except TimeoutError:
            problem = f"the object store did not answer within {CHANGE_TIMEOUT_S:.0f} s"
            raise OutcomeUnknown(f"{problem}: the policy may be stored, or not") from None
        return admin_pb2.SetAccessPolicyReply(header=self._header(), version=stored.version)


def shown_to(reply: admin_pb2.StatusReply, call: Call) -> admin_pb2.StatusReply:
    """Leave in a status what callers without the verb ADMIN may know: whether the server is well.

    The rest tells how many keys and calls of others there are, and of places.
    """
    if call.caller is None or call.caller.permissions.allow(_ADMIN):
        return reply
    for field, _ in reply.ListFields():
        if field.name not in _SHOWN_TO_ALL:
            reply.ClearField(field.name)  # type: ignore[arg-type] # the name of a field
    for readiness in (reply.read_readiness, reply.write_readiness):
        readiness.ClearField("problem")  # may name objects and places; the cause does not
    return reply


def _check(header: kv_pb2.RequestHeader) -> None:
    requests.check_header(header)
    if header.snapshot_id:
        raise InvalidRequest("header.snapshot_id", "this call reads no state")
    if header.idempotency_key:
        problem = "a change names the version that it replaces, so it is made once"
        raise InvalidRequest("header.idempotency_key", problem)


def _decoded(message: access_pb2.AccessPolicy) -> Policy:
    try:
        return policy_of(message)
    except ValueError as error:
        path, _, problem = str(error).partition(": ")
        raise InvalidRequest(f"policy.{path}", problem) from None
