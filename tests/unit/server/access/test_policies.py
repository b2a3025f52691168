"""The access policy of a process: when a change counts, what it costs, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.errors import (
    DatabaseNotFound,
    InvalidRequest,
    InvalidSetting,
    PermissionDenied,
    PolicyChanged,
    PolicyUnknown,
)
from shalekv.format.access import ENVELOPE
from shalekv.format.names import policy_name
from shalekv.protocol.access import (
    ANONYMOUS,
    ANYBODY,
    AUTHENTICATED,
    ROOT,
    Grant,
    Need,
    Policy,
    Principal,
    Role,
    Rule,
    Verb,
    permissions_of,
)
from shalekv.runtime import Runtime
from shalekv.server.access.policies import RETRY_MS_MAX, UNUSED_CHECK_MS, AccessPolicies
from shalekv.server.database import create_database
from shalekv.settings import AccessSettings, StoreSettings
from shalekv.store.api import Created
from shalekv.store.cas import CasStore
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.store import FOR_EVER, FaultyStore, nothing
from tests.kit.virtual_time import virtual_time

ANN, BOB = Principal("token:ann"), Principal("token:bob")
CHECK_MS, AGE_MS_MAX = 2_000, 60_000
BY_ANN = Policy(is_enforced=True, grants=(Grant(ANN.name, (ROOT,)),))
ADMIN = Need(Verb.ADMIN)


def runtime() -> Runtime:
    return Runtime(clock=LoopClock(), random=Random(), workers=InlineWorkers())


class Place:
    """A database, and processes that know its policy; each has a store of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    async def created(cls) -> Place:
        return cls(await Database.created())

    def process(
        self, admins: str = "", *, knows_callers: bool = True
    ) -> tuple[AccessPolicies, FaultyStore]:
        store = FaultyStore(self.database.another_store())
        settings = AccessSettings(
            admins=admins, policy_check_ms=CHECK_MS, policy_age_ms_max=AGE_MS_MAX
        )
        cas = CasStore(store, runtime(), StoreSettings(read_attempts=1))
        return AccessPolicies(cas, settings, knows_callers=knows_callers), store


@asynccontextmanager
async def running(policies: AccessPolicies) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(policies.run())
        yield
        task.cancel()


async def sleep_ms(duration_ms: float) -> None:
    """Let virtual time pass."""
    await LoopClock().sleep_ms(duration_ms)


@virtual_time()
async def test_nothing_is_enforced_until_somebody_says_so() -> None:
    """Without a policy and without admins, everybody may do everything, however old that is."""
    policies, _ = (await Place.created()).process()
    assert await policies.refresh() == policies.policy == Policy()
    await sleep_ms(10 * AGE_MS_MAX)
    assert not policies.is_stale


@virtual_time()
async def test_admins_of_the_settings_are_alone_at_first() -> None:
    """With them version 0 is enforced; they stay root, whatever is stored, unless it is open."""
    place = await Place.created()
    policies, _ = place.process(admins="token:ann, uri:x")
    assert policies.policy.is_enforced
    assert policies.is_stale, "nothing was read yet"
    await policies.refresh()
    assert not policies.is_stale
    assert permissions_of(policies.policy, ANN).allow(ADMIN)
    assert permissions_of(policies.policy, BOB).is_empty
    await policies.replace(replace(BY_ANN, grants=(Grant(BOB.name, (ROOT,)),)), ANN)
    assert permissions_of(policies.policy, ANN).allow(ADMIN)
    assert policies.stored.grants == (Grant(BOB.name, (ROOT,)),)
    await policies.replace(Policy(version=1), ANN)
    assert permissions_of(policies.policy, ANONYMOUS).allow(ADMIN)


@pytest.mark.parametrize("admins", ["ann", "token:", ANYBODY, f"token:ann,{AUTHENTICATED}"])
@virtual_time()
async def test_wrong_admins_are_an_invalid_setting(admins: str) -> None:
    """Also everybody, or everybody with credentials, as administrators."""
    with pytest.raises(InvalidSetting, match="--admins: "):
        (await Place.created()).process(admins=admins)


@virtual_time()
async def test_a_change_is_known_at_once_here_and_within_the_interval_elsewhere() -> None:
    """Who stores it knows; others find it at their next look. Listeners are told once."""
    place = await Place.created()
    (writing, _), (reading, _) = place.process(), place.process()
    told: list[tuple[str, int]] = []
    writing.listen(lambda: told.append(("writing", writing.policy.version)))
    reading.listen(lambda: told.append(("reading", reading.policy.version)))
    await reading.refresh()
    async with running(reading), running(writing):
        await sleep_ms(CHECK_MS + 1)
        await writing.replace(BY_ANN, ANN)
        assert (writing.policy.version, reading.policy.version) == (1, 0)
        assert told == [("writing", 1)]
        await sleep_ms(CHECK_MS)
        assert reading.policy == writing.policy
        await sleep_ms(10 * CHECK_MS)
    assert told == [("writing", 1), ("reading", 1)]


@virtual_time()
async def test_a_look_costs_one_request() -> None:
    """Each interval sends one GET while nothing changes, and nothing else."""
    policies, store = (await Place.created()).process()
    await policies.replace(BY_ANN, ANN)
    store.requests.clear()
    async with running(policies):
        await sleep_ms(50 * CHECK_MS + CHECK_MS / 2)
    assert [(each.operation, each.name) for each in store.requests] == [
        ("get", policy_name(2))
    ] * 50


@virtual_time()
async def test_a_process_that_knows_nobody_looks_rarely_until_there_is_a_policy() -> None:
    """A database without access control pays for few requests; the first policy is found soon."""
    place = await Place.created()
    (policies, store), (other, _) = place.process(knows_callers=False), place.process()
    await policies.refresh()
    store.requests.clear()
    async with running(policies):
        await sleep_ms(10 * UNUSED_CHECK_MS + CHECK_MS / 2)
        assert len(store.requests) == 10
        await other.replace(BY_ANN, ANN)
        await sleep_ms(UNUSED_CHECK_MS)
        assert policies.policy == other.policy
        await other.replace(Policy(version=1), ANN)
        await sleep_ms(CHECK_MS)
        assert policies.policy == other.policy


@virtual_time()
async def test_a_policy_becomes_stale_while_the_store_is_away() -> None:
    """It is used for its greatest age, and again when the store is back; both are logged once."""
    place = await Place.created()
    policies, store = place.process()
    await policies.replace(BY_ANN, ANN)
    await policies.refresh()
    store.fail("get", times=FOR_EVER)
    async with running(policies):
        with capture_logs() as lines:
            await sleep_ms(AGE_MS_MAX - 1)
            assert not policies.is_stale
            policies.check()
            await sleep_ms(2)
            assert policies.is_stale
            with pytest.raises(PolicyUnknown):
                policies.check()
            await sleep_ms(10 * AGE_MS_MAX)
            store.before = nothing
            await sleep_ms(RETRY_MS_MAX)
            assert not policies.is_stale
    own = [line["event"] for line in lines if "policy" in line["event"]]
    assert own == ["access policy not read", "access policy read again"]
    asked = len(store.asked("get", "access/"))
    assert asked < 11 * AGE_MS_MAX / RETRY_MS_MAX + 10


@virtual_time()
async def test_a_version_that_cannot_be_read_is_not_passed_over() -> None:
    """A version of a later format leaves the last one in force, which becomes stale: also if that
    one is not enforced.
    """
    place = await Place.created()
    policies, store = place.process()
    await policies.refresh()
    unreadable = replace(ENVELOPE, version=2).seal(b"")
    assert await store.create(policy_name(1), unreadable) == Created()
    async with running(policies):
        await sleep_ms(AGE_MS_MAX - 1)
        assert not policies.is_stale
        await sleep_ms(RETRY_MS_MAX)
        assert policies.is_stale
        assert policies.policy.version == 0


@virtual_time()
async def test_of_two_changes_in_two_processes_one_is_refused() -> None:
    """The second one is told, and its process knows the first change then."""
    place = await Place.created()
    (one, _), (other, _) = place.process(), place.process()
    await other.refresh()
    await one.replace(BY_ANN, ANN)
    with pytest.raises(PolicyChanged):
        await other.replace(replace(BY_ANN, grants=(Grant(BOB.name, (ROOT,)),)), BOB)
    assert other.policy == one.policy


@virtual_time()
async def test_who_has_just_lost_the_right_cannot_take_it_back() -> None:
    """Not even at a process that does not know it yet, by the number of a version to come."""
    place = await Place.created()
    (one, _), (other, store) = place.process(), place.process()
    both = replace(BY_ANN, grants=(*BY_ANN.grants, Grant(BOB.name, (ROOT,))))
    await other.replace(both, ANN)
    await one.refresh()
    await one.replace(replace(BY_ANN, version=1), ANN)
    assert permissions_of(other.policy, BOB).allow(ADMIN), "the guard there lets the call in"
    created = store.asked("create")
    with pytest.raises(PermissionDenied):
        await other.replace(replace(both, version=2), BOB, is_forced=True)
    assert store.asked("create") == created
    assert other.policy == one.policy


def with_role(*grants: Grant) -> Policy:
    roles = (
        Role("ops", (Rule(frozenset({Verb.ADMIN})),)),
        Role("reads", (Rule(frozenset({Verb.READ})),)),
    )
    return Policy(is_enforced=True, roles=roles, grants=grants)


@pytest.mark.parametrize(
    ("policy", "caller", "problem"),
    [
        (with_role(), ANN, "ann, would lose the verb"),
        (with_role(Grant(BOB.name, ("ops",))), ANN, "ann, would lose the verb"),
        (with_role(Grant(ANN.name, ("reads",))), ANN, "ann, would lose the verb"),
        (with_role(Grant(AUTHENTICATED, ("ops",))), ANONYMOUS, "anonymous, would lose the verb"),
    ],
)
@virtual_time()
async def test_a_lock_out_needs_force(policy: Policy, caller: Principal, problem: str) -> None:
    """An enforced policy must leave the caller, and somebody beside --admins, with ADMIN."""
    policies, store = (await Place.created()).process(admins=BOB.name)
    policy = replace(policy, version=(await policies.replace(Policy(), BOB)).version)
    created = store.asked("create")
    with pytest.raises(InvalidRequest, match=problem) as refused:
        await policies.replace(policy, caller)
    assert refused.value.field == "force"
    assert store.asked("create") == created
    stored = await policies.replace(policy, caller, is_forced=True)
    assert stored.version == policies.policy.version == 2


@virtual_time()
async def test_the_last_administrator_of_a_policy_needs_force() -> None:
    """Not so while nobody but --admins has been one: the first policy stays enforced like that."""
    policies, store = (await Place.created()).process(admins=BOB.name)
    await policies.refresh()
    assert policies.shown == Policy(is_enforced=True)
    first = await policies.replace(replace(policies.shown, roles=with_role().roles), BOB)
    assert first.is_enforced
    granted = await policies.replace(replace(first, grants=(Grant(ANN.name, ("ops",)),)), BOB)
    created = store.asked("create")
    with pytest.raises(InvalidRequest, match="nobody but the --admins"):
        await policies.replace(replace(granted, grants=()), BOB)
    opened = await policies.replace(replace(granted, grants=(), is_enforced=False), BOB)
    assert policies.shown == opened
    with pytest.raises(InvalidRequest, match="nobody but the --admins"):
        await policies.replace(replace(opened, is_enforced=True), BOB)
    assert len(store.asked("create")) == len(created) + 1


@pytest.mark.parametrize(
    "policy",
    [
        with_role(Grant(ANN.name, ("ops",))),
        with_role(Grant("claim:groups=ops", ("reads", "ops")), Grant(ANN.name, (ROOT,))),
        with_role(Grant(AUTHENTICATED, (ROOT,))),
        replace(with_role(), is_enforced=False),
    ],
)
@virtual_time()
async def test_a_policy_that_locks_nobody_out_needs_no_force(policy: Policy) -> None:
    """Nor does one that is not enforced."""
    policies, _ = (await Place.created()).process()
    assert (await policies.replace(policy, ANN)).version == 1


@virtual_time()
async def test_a_database_that_does_not_exist_yet_is_waited_for() -> None:
    """A process on standby looks for a policy before another has created the database."""
    place = Place(Database())
    policies, _ = place.process()
    with pytest.raises(DatabaseNotFound):
        await policies.refresh()
    async with running(policies):
        await sleep_ms(CHECK_MS + 1)
        await create_database(place.database.store, runtime(), StoreSettings())
        await sleep_ms(RETRY_MS_MAX)
    assert not policies.is_stale
    assert policies.stored == Policy()
