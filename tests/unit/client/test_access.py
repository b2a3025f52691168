"""The access policy as clients read and change it, on a real server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shalekv_client import (
    AccessGrant,
    AccessPolicy,
    AccessQuota,
    AccessRole,
    AccessRule,
    AccessVerb,
    Client,
    InvalidRequest,
    PolicyChanged,
    SyncClient,
)
from tests.kit.processes.in_process import memory_store, serving

POLICY = AccessPolicy(
    roles=(
        AccessRole(
            "orders",
            (
                AccessRule(frozenset({AccessVerb.READ, AccessVerb.WATCH}), prefix=b"orders/"),
                AccessRule(frozenset({AccessVerb.WRITE}), b"a", b"b"),
                AccessRule(frozenset({AccessVerb.DELETE_RANGE, AccessVerb.INGEST})),
            ),
        ),
        AccessRole("nothing"),
    ),
    grants=(
        AccessGrant("token:ann", ("orders", "nothing"), AccessQuota(1, 2, 3, 4, 5, 6, 7)),
        AccessGrant("claim:groups=ops", ("root",)),
    ),
)
# A prefix is stored as a range.
STORED = AccessRule(frozenset({AccessVerb.READ, AccessVerb.WATCH}), b"orders/", b"orders0")


def stored(policy: AccessPolicy, version: int) -> AccessPolicy:
    role = policy.roles[0]
    roles = (replace(role, rules=(STORED, *role.rules[1:])), *policy.roles[1:])
    return replace(policy, version=version, roles=roles)


async def test_a_policy_comes_back_as_it_was_set() -> None:
    """With a version that each change raises by one."""
    async with serving(memory_store()) as served, Client(served.listen) as client:
        assert await client.access_policy() == AccessPolicy()
        assert await client.set_access_policy(POLICY) == 1
        assert await client.access_policy() == stored(POLICY, 1)
        assert await client.set_access_policy(AccessPolicy(version=1)) == 2
        assert await client.access_policy() == AccessPolicy(version=2)


async def test_a_policy_that_was_replaced_meanwhile_is_refused() -> None:
    """The error says that nothing was applied, and the policy of the other stays."""
    async with serving(memory_store()) as served, Client(served.listen) as client:
        await client.set_access_policy(POLICY)
        with pytest.raises(PolicyChanged, match="has version 1 by now, not 0"):
            await client.set_access_policy(AccessPolicy())
        assert await client.access_policy() == stored(POLICY, 1)


async def test_a_wrong_policy_names_its_field() -> None:
    """A malformed grant or range is refused with the path of its field."""
    wrong = AccessPolicy(grants=(AccessGrant("ann"),))
    unclear = AccessRole("a", (AccessRule(frozenset({AccessVerb.READ}), b"a", prefix=b"b"),))
    async with serving(memory_store()) as served, Client(served.listen) as client:
        with pytest.raises(InvalidRequest, match="not a subject") as refused:
            await client.set_access_policy(wrong)
        assert refused.value.field == "policy.grants[0].subject"
        with pytest.raises(InvalidRequest, match="excludes start and end") as refused:
            await client.set_access_policy(AccessPolicy(roles=(unclear,)))
        assert refused.value.field == "policy.roles[0].rules[0].range.prefix"


async def test_enforcing_against_oneself_needs_force() -> None:
    """A caller without credentials would lose every right."""
    enforced = replace(POLICY, is_enforced=True)
    async with serving(memory_store()) as served, Client(served.listen) as client:
        with pytest.raises(InvalidRequest, match="the caller, anonymous, would lose") as refused:
            await client.set_access_policy(enforced)
        assert refused.value.field == "force"
        assert await client.set_access_policy(enforced, force=True) == 1


async def test_a_caller_is_anonymous_and_free_where_nothing_is_enforced() -> None:
    """`who_am_i` says so."""
    async with serving(memory_store()) as served, Client(served.listen) as client:
        found = await client.who_am_i()
        assert (found.principal, found.subjects, found.is_enforced) == ("", (), False)
        assert found.rules == (AccessRule(frozenset(AccessVerb)),)
        assert (found.quota, found.expires_at_ms) == (AccessQuota(), 0)


async def test_a_verb_of_a_newer_server_is_not_dropped() -> None:
    """A policy with it can be read, and cannot be stored without it."""
    policy = AccessPolicy(roles=(AccessRole("a", (AccessRule(frozenset({None})),)),))
    async with serving(memory_store()) as served, Client(served.listen) as client:
        with pytest.raises(ValueError, match="unknown to this client"):
            await client.set_access_policy(policy)


async def test_the_blocking_client_has_the_same_calls() -> None:
    """In a thread, as programs use it."""

    def use(address: str) -> AccessPolicy:
        with SyncClient(address) as client:
            assert client.who_am_i().principal == ""
            assert client.set_access_policy(POLICY) == 1
            return client.access_policy()

    async with serving(memory_store()) as served:
        assert await asyncio.to_thread(use, served.listen) == stored(POLICY, 1)
