"""Election in the bucket, in virtual time, next to the other objects of a database."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

import pytest

from shalekv.format.election import encode_lease
from shalekv.format.names import ELECTION_FOLDER, election_name, parse_election_name
from shalekv.jobs.collect import CollectJob
from shalekv.protocol.lease import KEPT, ElectionLease
from shalekv.runtime import Runtime
from shalekv.server.database import create_database
from shalekv.server.election.bucket import BucketElector, BucketLease
from shalekv.server.election.elector import LeasedTerm
from shalekv.settings import CollectorSettings, StoreSettings
from shalekv.store.cas import CasStore, Claimed
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.memory_records import MemoryRecords, Table
from tests.kit.store import STORE_NOW_MS, FaultyStore, Request
from tests.kit.virtual_time import with_simulation
from tests.sim.faults import Faults
from tests.sim.nodes import Node
from tests.sim.simulation import Simulation

TTL_MS = 3_000


@dataclass(slots=True)
class Candidates:
    """All candidates of one bucket."""

    sim: Simulation
    reigning: dict[str, float] = field(default_factory=dict)  # since when
    endings: list[str] = field(default_factory=list)  # why each term ended
    holders: dict[str, str] = field(default_factory=dict)  # the last holder reported to each
    most: int = 0  # that held the lease at one moment

    def elector(self, name: str) -> BucketElector:
        node = self.sim.node(name)
        runtime = self.sim.runtime_for(node)
        store = CasStore(self.sim.store_for(node), runtime, StoreSettings())
        return BucketElector(
            store,
            holder=name,
            ttl_ms=TTL_MS,
            on_holder_change=lambda holder: self._note_holder(name, holder),
        )

    def start(self, name: str) -> Node:
        """A process that campaigns for ever, and holds the lease as long as it can."""
        node = self.sim.node(name)
        node.start(self._campaign(name))
        return node

    def crash(self, name: str) -> None:
        self.sim.crash(name)
        self._over(name, "crashed")

    def began(self, name: str) -> None:
        self.reigning[name] = self.sim.now_ms
        self.most = max(self.most, len(self.reigning))

    def _over(self, name: str, why: str) -> None:
        if name in self.reigning:
            del self.reigning[name]
            self.endings.append(why)

    async def _campaign(self, name: str) -> None:
        elector = self.elector(name)
        while True:
            term: LeasedTerm = await elector.campaign()
            self.began(name)
            self._over(name, await term.keep())

    def _note_holder(self, name: str, holder: str) -> None:
        self.holders[name] = holder

    async def reigns_somebody(self) -> str:
        while not self.reigning:
            await self.sim.sleep_ms(10)
        return next(iter(self.reigning))


ORDERS = 3
HELD = ElectionLease("there", bytes(16), TTL_MS)


async def ids(sim: Simulation) -> list[int | None]:
    listed = sim.store_for("looker").list(ELECTION_FOLDER)
    return [parse_election_name(info.name) async for info in listed]


@with_simulation(ORDERS)
async def test_a_crash_is_followed_by_another_holder(sim: Simulation) -> None:
    """After a crash another candidate takes over when the TTL is over, and soon after."""
    candidates = Candidates(sim)
    for name in "abc":
        candidates.start(name)
    for _ in range(10):
        holder = await candidates.reigns_somebody()
        await sim.sleep_ms(sim.rng.uniform(0, 3 * TTL_MS))
        candidates.crash(holder)
        crashed_ms = sim.now_ms
        successor = await candidates.reigns_somebody()
        waited_ms = sim.now_ms - crashed_ms
        assert successor != holder
        assert TTL_MS / 2 < waited_ms < 1.4 * TTL_MS
        candidates.start(holder)
    assert candidates.most == 1


@with_simulation(seed=1)
async def test_a_released_lease_is_taken_at_once(sim: Simulation) -> None:
    """A released lease is taken without waiting for its TTL."""
    candidates = Candidates(sim)
    term = await sim.node("a").run(candidates.elector("a").campaign())
    candidates.start("b")
    await sim.sleep_ms(TTL_MS / 2)
    assert not candidates.reigning
    await sim.node("a").run(term.resign())
    resigned_ms = sim.now_ms
    assert await candidates.reigns_somebody() == "b"
    assert sim.now_ms - resigned_ms < TTL_MS / 3


@with_simulation(seed=1)
async def test_a_renewal_that_was_cut_off_does_not_hinder_the_release(sim: Simulation) -> None:
    """A holder that ends in the middle of a renewal can still release its lease."""
    candidates = Candidates(sim)
    node = sim.node("a")
    term = await node.run(candidates.elector("a").campaign())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(TTL_MS / 3_000 + 0.015):  # the create is on its way
            await node.run(term.keep())
    await node.run(term.resign())
    assert await ids(sim) == [0, 1, 2]
    candidates.start("b")
    await sim.sleep_ms(TTL_MS / 3)
    assert "b" in candidates.reigning


async def test_a_candidate_behind_others_is_not_elected() -> None:
    """A stalled candidate that creates a deleted name finds that it is not the highest."""
    objects = MemoryObjects()
    runtime = yielding_runtime()
    highest = 40

    async def overtake(request: Request) -> None:
        if request.operation == "create" and parse_election_name(request.name) == 1:
            for lease_id in range(highest - KEPT, highest + 1):
                await inner.create(election_name(lease_id), encode_lease(lease_id, HELD))

    inner = MemoryStore(lambda: 0, objects=objects)
    store = FaultyStore(inner, before=overtake)
    await store.create(election_name(0), encode_lease(0, HELD))
    holders: list[str] = []
    cas = CasStore(store, runtime, StoreSettings())
    await BucketElector(
        cas, holder="late", ttl_ms=TTL_MS, on_holder_change=holders.append
    ).campaign()
    found = [parse_election_name(info.name) for info in objects.page(ELECTION_FOLDER, "")]
    assert found[-1] == highest + 1
    assert holders.count("late") == 1
    assert "there" in holders[holders.index("there") + 1 :]  # seen again, after it came behind


@with_simulation(seed=1)
async def test_what_cannot_be_read_is_waited_out(sim: Simulation) -> None:
    """An object that is not a valid lease delays candidates by one TTL, as any lease."""
    candidates = Candidates(sim)
    await sim.store_for("other").create(election_name(41), b"of a newer version")
    candidates.start("a")
    await sim.sleep_ms(TTL_MS)
    assert not candidates.reigning
    await sim.sleep_ms(TTL_MS / 2)
    assert "a" in candidates.reigning


@with_simulation(seed=1)
async def test_a_rival_ends_a_tenure(sim: Simulation) -> None:
    """A holder that finds another's lease under the next name has lost its own, and names it."""
    candidates = Candidates(sim)
    node = sim.node("a")
    term = await node.run(candidates.elector("a").campaign())
    runtime = sim.runtime_for("b")
    cas = CasStore(sim.store_for("b"), runtime, StoreSettings())
    seen = await cas.get(election_name(0))
    await sim.store_for("b").create(election_name(1), seen.data)  # not of that id
    assert await node.run(term.keep()) == "somebody else has taken the lease"
    await node.run(term.resign())
    assert await ids(sim) == [0, 1]


@with_simulation(ORDERS, faults=Faults.rough())
async def test_a_rough_store_delays_elections_and_no_more(sim: Simulation) -> None:
    """With lost and delayed requests and slow periods, the lease still changes hands and is held
    again; each holder that loses it gets a reason.
    """
    candidates = Candidates(sim)
    for name in "abc":
        candidates.start(name)
    for _ in range(20):
        await candidates.reigns_somebody()
        await sim.sleep_ms(sim.rng.uniform(0, 20 * TTL_MS))
        if sim.rng.random() < 0.5:
            name = sim.rng.choice("abc")
            candidates.crash(name)
            candidates.start(name)
    sim.store.faults = Faults.none()
    await sim.sleep_ms(300_000)  # late requests arrive
    await candidates.reigns_somebody()
    assert len(candidates.reigning) == 1
    assert all(candidates.endings)
    assert len(await ids(sim)) <= 3 * KEPT


RENEWALS = 200
LEASE = ElectionLease("a", bytes(16), 3_000)
OLD_MS = 10**9  # all that is there is older than a collector has to wait for


class Bucket:
    """A bucket without conditional writes: records decide which process has created an object."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.table: Table = {}
        self.now_ms = STORE_NOW_MS
        self._seeds = Random(1)

    def store(self) -> TwoPhaseStore:
        plain = MemoryStore(lambda: self.now_ms, objects=self.objects)
        return TwoPhaseStore(plain, MemoryRecords(table=self.table), self._runtime())

    def cas(self) -> CasStore:
        return CasStore(self.store(), self._runtime(), StoreSettings())

    def _runtime(self) -> Runtime:
        return yielding_runtime(self._seeds.getrandbits(32))

    def leases(self) -> list[str]:
        return [info.name for info in self.objects.page(ELECTION_FOLDER, "")]


async def test_records_of_leases_do_not_pile_up() -> None:
    """The record of a lease is deleted with it; the collector removes those that a crash has left,
    and no records of leases that exist.
    """
    bucket = Bucket()
    store = bucket.cas()
    await create_database(bucket.store(), store.runtime, StoreSettings())
    records_before = len(bucket.table)
    assert await store.claim(election_name(0), encode_lease(0, LEASE)) == Claimed()
    lease = BucketLease(store, LEASE, 0, bucket.leases())
    for _ in range(RENEWALS):
        assert await lease.renew() is None
    left = bucket.leases()
    assert KEPT < len(left) <= 2 * KEPT + 1
    assert len(bucket.table) == records_before + len(left)
    crashed = MemoryStore(lambda: bucket.now_ms, objects=bucket.objects)
    await crashed.delete(left[:3])
    bucket.now_ms += OLD_MS
    await CollectJob(bucket.cas(), CollectorSettings(wal_retention_s=0)).collect()
    assert bucket.leases() == left[3:]
    assert len(bucket.table) == records_before + len(left[3:])
    assert await lease.renew() is None


async def test_what_a_crash_left_half_done_is_deleted_with_the_leases() -> None:
    """A temporary object of two-phase compare-and-swap is deleted with its lease."""
    bucket = Bucket()
    store = bucket.cas()
    half_done = f"{election_name(3)}.{'0' * 8}-0000-4000-8000-{'0' * 12}.00000000"
    plain = MemoryStore(lambda: bucket.now_ms, objects=bucket.objects)
    await plain.create(half_done, b"half done")
    lease = BucketLease(store, LEASE, 0, bucket.leases())
    for _ in range(3 * KEPT):
        assert await lease.renew() is None
    assert half_done not in bucket.leases()
