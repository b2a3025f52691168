"""The stored access policy: versions in a row, one winner of each, and what reading them costs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from shalekv.errors import (
    InvalidRequest,
    ObjectNotFound,
    PolicyChanged,
    StoreUnavailable,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.format.access import ENVELOPE, decode_policy, encode_policy
from shalekv.format.names import policy_name
from shalekv.protocol.access import ANYBODY, ROOT, SECRET_BYTES, Grant, Policy, Role
from shalekv.settings import StoreSettings
from shalekv.store import policies
from shalekv.store.api import Created, ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from shalekv.store.policies import StoredPolicy
from tests.kit.inline_runtime import inline_runtime
from tests.kit.scripted_store import Fate, ScriptedStore
from tests.kit.store import FaultyStore, Request, nothing
from tests.kit.virtual_time import with_simulation
from tests.sim.faults import Faults, Span
from tests.sim.simulation import Simulation

DATABASE_ID = b"id of a database"
OPEN = Policy(grants=(Grant(ANYBODY, (ROOT,)),))


def an_empty_store() -> FaultyStore:
    return FaultyStore(MemoryStore(lambda: 0))


def sent(store: FaultyStore) -> list[str]:
    """Return the requests since the last call."""
    lines = [f"{each.operation} {each.name}" for each in store.requests]
    store.requests.clear()
    return lines


def policy_in(store: FaultyStore, seed: int = 0) -> StoredPolicy:
    """The policy in `store`, before the first read, of a process of its own."""
    return StoredPolicy(CasStore(store, inline_runtime(seed), StoreSettings()), DATABASE_ID)


async def test_a_database_without_a_policy_has_version_0() -> None:
    """Nothing is enforced, and nothing seals."""
    assert await policy_in(an_empty_store()).refresh() == Policy()


async def test_versions_follow_each_other_and_keep_the_secret() -> None:
    """The first change draws the secret; another process reads the newest version."""
    store = an_empty_store()
    writing, reading = policy_in(store), policy_in(store, seed=1)
    first = await writing.replace(OPEN)
    assert (first.version, len(first.secret)) == (1, SECRET_BYTES)
    assert await reading.refresh() == first
    second = await reading.replace(replace(first, is_enforced=True, secret=b"not this one"))
    assert second == replace(first, version=2, is_enforced=True)
    assert (reading.current, await policy_in(store).refresh()) == (second, second)
    assert await writing.refresh() == second


async def test_news_cost_one_request_and_nothing_new_costs_one() -> None:
    """The folder is listed once; then each look asks for the next version alone."""
    store = an_empty_store()
    writing, reading = policy_in(store), policy_in(store, seed=1)
    for version in range(3):
        await writing.replace(replace(OPEN, version=version))
    sent(store)
    await reading.refresh()
    assert sent(store) == ["list access/", f"get {policy_name(3)}", f"get {policy_name(4)}"]
    sent(store)
    await reading.refresh()
    await reading.refresh()
    assert sent(store) == [f"get {policy_name(4)}"] * 2
    await writing.replace(replace(OPEN, version=3))
    sent(store)
    await reading.refresh()
    assert sent(store) == [f"get {policy_name(4)}", f"get {policy_name(5)}"]


async def test_one_of_two_changes_is_refused() -> None:
    """Whoever comes second is told, and knows the other's policy from then on."""
    store = an_empty_store()
    one, other = policy_in(store), policy_in(store, seed=1)
    outcomes = await asyncio.gather(
        one.replace(OPEN), other.replace(Policy()), return_exceptions=True
    )
    winners = [outcome for outcome in outcomes if isinstance(outcome, Policy)]
    assert [winner.version for winner in winners] == [1]
    assert [type(outcome) for outcome in outcomes if outcome not in winners] == [PolicyChanged]
    assert one.current == other.current == winners[0]


async def test_a_change_that_comes_between_is_found_by_the_create() -> None:
    """Another process stores its change after the first one has looked: the first is refused."""
    store = an_empty_store()
    one, other = policy_in(store), policy_in(store, seed=1)

    async def overtake(request: Request) -> None:
        if request.operation == "create":
            store.before = nothing
            await other.replace(OPEN)

    store.before = overtake
    with pytest.raises(PolicyChanged, match="has version 1 by now, not 0"):
        await one.replace(Policy())
    assert one.current == other.current
    assert await policy_in(store, seed=2).refresh() == other.current


async def test_a_slow_read_does_not_bring_an_older_version_back() -> None:
    """Of two looks at once, the one that began earlier ends later."""
    store = an_empty_store()
    writing, reading = policy_in(store), policy_in(store, seed=1)
    await reading.refresh()
    for version in range(2):
        await writing.replace(replace(OPEN, version=version))

    async def overtaken(request: Request) -> None:
        if request.name == policy_name(1):
            store.after = nothing
            await reading.refresh()

    store.after = overtaken
    await reading.read_next()
    assert reading.current == writing.current


@pytest.mark.parametrize("version", [0, 2, 7])
async def test_a_change_of_another_version_is_refused(version: int) -> None:
    """Neither an older nor a later version than the present one can be replaced: no gap arises."""
    store = an_empty_store()
    stored = policy_in(store)
    await stored.replace(OPEN)
    sent(store)
    with pytest.raises(PolicyChanged, match=f"has version 1 by now, not {version}"):
        await stored.replace(replace(OPEN, version=version))
    assert sent(store) == [f"get {policy_name(2)}"]


@pytest.mark.parametrize("fate", [Fate.REQUEST_LOST, Fate.REPLY_LOST, Fate.LATE, Fate.REFUSED])
async def test_a_change_whose_reply_is_lost_is_stored_once(fate: Fate) -> None:
    """A create that was not answered is carried to a known outcome."""
    store = ScriptedStore()
    store.creates = [fate, fate]
    stored = await policy_in(store).replace(OPEN)
    assert stored.version == 1
    assert await policy_in(store, seed=1).refresh() == stored


async def test_a_torn_list_hides_no_version() -> None:
    """What the list does not show is found by the reads after it, whichever it is."""
    for shown in range(3):
        store = an_empty_store()
        writing = policy_in(store)
        for version in range(3):
            await writing.replace(replace(OPEN, version=version))
        store.hidden = {policy_name(version) for version in range(shown + 1, 4)}
        assert (await policy_in(store, seed=1).refresh()).version == 3


async def test_a_policy_of_another_database_is_refused() -> None:
    """Remains of a database that was here before are not taken for a policy."""
    store = an_empty_store()
    data = encode_policy(
        replace(OPEN, version=1, secret=bytes(SECRET_BYTES)),
        database_id=b"another database",
        write_id=bytes(16),
    )
    assert await store.create(policy_name(1), data) == Created()
    with pytest.raises(WrongObject, match="belongs to database 616e"):
        await policy_in(store).refresh()


async def test_a_policy_of_a_later_version_is_an_error() -> None:
    """What this process does not understand does not count as the end of the versions."""
    store = an_empty_store()
    stored = policy_in(store)
    first = await stored.replace(OPEN)
    data = replace(ENVELOPE, version=2).seal(b"")
    assert await store.create(policy_name(2), data) == Created()
    with pytest.raises(UnsupportedVersion):
        await stored.refresh()
    assert stored.current == first


async def test_bad_and_large_policies_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are errors of the request, before anything is sent to the store."""
    store = an_empty_store()
    stored = policy_in(store)
    with pytest.raises(InvalidRequest, match="every policy has the role 'root'"):
        await stored.replace(Policy(roles=(Role(ROOT, ()),)))
    monkeypatch.setattr(policies, "POLICY_BYTES_MAX", 100)
    with pytest.raises(InvalidRequest, match="100 at most"):
        await stored.replace(OPEN)
    assert not [line for line in sent(store) if line.startswith("create")]
    assert (await stored.refresh()).version == 0


ROUGH = Faults(
    request_ms=Span(1, 400),
    reply_ms=Span(1, 400),
    timeout_ms=1_000,
    lost_request=0.1,
    lost_reply=0.1,
    late_request=0.1,
    late_ms=Span(1, 20_000),
    refused=0.1,
)
EDITS = 5


@with_simulation(6, seed=1, faults=ROUGH)
async def test_no_change_is_lost_on_a_rough_store(sim: Simulation) -> None:
    """Processes that edit at once, and crash, leave versions in a row with one secret; whatever
    was acknowledged is in all that follow.
    """
    acknowledged = list[str]()

    async def edit(name: str) -> None:
        node = sim.node(name)
        cas = CasStore(sim.store_for(node), sim.runtime_for(node), StoreSettings())
        stored = StoredPolicy(cas, DATABASE_ID)
        for number in range(EDITS):
            grant = Grant(f"token:{name}-{number}")
            while grant not in stored.current.grants:
                with suppress(PolicyChanged, StoreUnavailable):
                    policy = await stored.refresh()
                    if grant not in policy.grants:  # else an earlier attempt has succeeded
                        await stored.replace(replace(policy, grants=(*policy.grants, grant)))
            acknowledged.append(grant.subject)

    async with asyncio.TaskGroup() as tasks:
        for name in ("b", "c"):
            tasks.create_task(sim.node(name).run(edit(name)))
        sim.node("crashes").start(edit("crashes"))
        await sim.sleep_ms(5_000)
        sim.crash("crashes")
    await sim.node("later").run(edit("later"))
    versions = await sim.node("reader").run(all_versions(sim.store_for("reader")))
    assert [policy.version for policy in versions] == [*range(1, len(versions) + 1)]
    assert len({policy.secret for policy in versions}) == 1
    for older, newer in pairwise(versions):
        assert newer.grants[:-1] == older.grants
    assert {*acknowledged} <= {grant.subject for grant in versions[-1].grants}
    assert len(acknowledged) >= 3 * EDITS


async def all_versions(store: ObjectStore) -> list[Policy]:
    found = list[Policy]()
    while True:
        name = policy_name(len(found) + 1)
        with suppress(StoreUnavailable):
            try:
                data = (await store.get(name)).data
            except ObjectNotFound:
                return found
            found.append(decode_policy(name, data, database_id=DATABASE_ID))
