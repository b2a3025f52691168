"""The election in the bucket, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from shalekv.core.leasing import KEPT, ElectionLease
from shalekv.format.election import encode_lease
from shalekv.format.names import ELECTION_FOLDER, election_name, parse_election_name
from shalekv.roles.electors.bucket import BucketElector
from shalekv.settings import StoreSettings
from shalekv.store.api import NO_METADATA, CreateOutcome
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.engine.running_log import yielding_runtime
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World
from tests.unit.election.candidates import TTL_MS, Candidates

SEEDS = range(6)
HELD = ElectionLease("there", bytes(16), TTL_MS)
MINUTES_MS = 300_000


async def ids(world: World) -> list[int | None]:
    """The ids of all leases in the bucket."""
    listed = world.store_for("looker").list(ELECTION_FOLDER)
    return [parse_election_name(info.name) async for info in listed]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_is_followed_by_another_holder(seed: int) -> None:
    """Not before the TTL is over, and not much later."""

    async def main(world: World) -> None:
        candidates = Candidates(world)
        for name in "abc":
            candidates.start(name)
        for _ in range(10):
            holder = await candidates.reigns_somebody()
            await world.sleep_ms(world.rng.uniform(0, 3 * TTL_MS))
            candidates.crash(holder)
            crashed_ms = world.now_ms
            successor = await candidates.reigns_somebody()
            waited_ms = world.now_ms - crashed_ms
            assert successor != holder
            assert TTL_MS / 2 < waited_ms < 1.4 * TTL_MS
            candidates.start(holder)
        assert candidates.most == 1

    simulate(seed, main)


def test_a_released_lease_is_taken_at_once() -> None:
    """Without a wait for the TTL."""

    async def main(world: World) -> None:
        candidates = Candidates(world)
        tenure = await world.node("a").run(candidates.elector("a").campaign())
        candidates.start("b")
        await world.sleep_ms(TTL_MS / 2)
        assert not candidates.reigning
        await world.node("a").run(tenure.resign())
        resigned_ms = world.now_ms
        assert await candidates.reigns_somebody() == "b"
        assert world.now_ms - resigned_ms < TTL_MS / 3

    simulate(1, main)


def test_a_renewal_that_was_cut_off_does_not_hinder_the_release() -> None:
    """A holder that ends in the middle of a renewal releases the lease all the same."""

    async def main(world: World) -> None:
        candidates = Candidates(world)
        node = world.node("a")
        tenure = await node.run(candidates.elector("a").campaign())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(TTL_MS / 3_000 + 0.015):  # the create is on its way
                await node.run(tenure.keep())
        await node.run(tenure.resign())
        assert await ids(world) == [0, 1, 2]
        candidates.start("b")
        await world.sleep_ms(TTL_MS / 3)
        assert "b" in candidates.reigning

    simulate(1, main)


async def test_who_creates_behind_others_is_not_elected() -> None:
    """A candidate that stood still creates a name that was deleted meanwhile: it notices that it is
    not the highest, and waits for the lease that is.
    """
    objects = MemoryObjects()
    runtime = yielding_runtime()
    highest = 40

    class Overtaken(MemoryStore):
        async def create(
            self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
        ) -> CreateOutcome:
            if parse_election_name(name) == 1:
                for lease_id in range(highest - KEPT, highest + 1):
                    lease = encode_lease(lease_id, HELD)
                    await super().create(election_name(lease_id), lease)
            return await super().create(name, data, metadata)

    store = Overtaken(lambda: 0, objects=objects)
    await store.create(election_name(0), encode_lease(0, HELD))
    told: list[str] = []
    cas = CasStore(store, runtime, StoreSettings())
    await BucketElector(cas, holder="late", ttl_ms=TTL_MS, told=told.append).campaign()
    found = [parse_election_name(info.name) for info in objects.page(ELECTION_FOLDER, "")]
    assert found[-1] == highest + 1
    assert told.count("late") == 1
    assert "there" in told[told.index("there") + 1 :]  # seen again, after it came behind


def test_a_lease_that_is_created_again_does_not_count() -> None:
    """A lease below the highest is not renewed into one: the next name is taken, or behind."""

    async def main(world: World) -> None:
        candidates = Candidates(world)
        candidates.start("a")
        await world.sleep_ms(50 * TTL_MS)
        store = world.store_for("late")
        await store.create(election_name(3), b"created too late")
        await world.sleep_ms(50 * TTL_MS)
        assert list(candidates.reigning) == ["a"]
        candidates.crash("a")
        candidates.start("b")
        await world.sleep_ms(2 * TTL_MS)
        assert list(candidates.reigning) == ["b"]
        await world.sleep_ms(20 * TTL_MS)
        assert 3 not in await ids(world)

    simulate(1, main)


def test_what_cannot_be_read_is_waited_out() -> None:
    """An object that is no lease holds candidates up for one TTL, as any lease."""

    async def main(world: World) -> None:
        candidates = Candidates(world)
        await world.store_for("other").create(election_name(41), b"of a newer version")
        candidates.start("a")
        await world.sleep_ms(TTL_MS)
        assert not candidates.reigning
        await world.sleep_ms(TTL_MS / 2)
        assert "a" in candidates.reigning

    simulate(1, main)


def test_a_rival_ends_a_tenure() -> None:
    """A holder that finds another's lease under the next name has lost its own, and says so."""

    async def main(world: World) -> None:
        candidates = Candidates(world)
        node = world.node("a")
        tenure = await node.run(candidates.elector("a").campaign())
        runtime = world.runtime_for("b")
        cas = CasStore(world.store_for("b"), runtime, StoreSettings())
        seen = await cas.reads.get(election_name(0))
        await world.store_for("b").create(election_name(1), seen.data)  # not of that id
        assert await node.run(tenure.keep()) == "somebody else has taken the lease"
        await node.run(tenure.resign())
        assert await ids(world) == [0, 1]

    simulate(1, main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rough_store_delays_elections_and_no_more(seed: int) -> None:
    """With lost requests, late ones and slow spells the lease changes hands, and somebody has it
    again and again; whoever loses it is told why.
    """

    async def main(world: World) -> None:
        candidates = Candidates(world)
        for name in "abc":
            candidates.start(name)
        for _ in range(20):
            await candidates.reigns_somebody()
            await world.sleep_ms(world.rng.uniform(0, 20 * TTL_MS))
            if world.rng.random() < 0.5:
                name = world.rng.choice("abc")
                candidates.crash(name)
                candidates.start(name)
        world.store.faults = Faults.none()
        await world.sleep_ms(300_000)  # late requests arrive
        await candidates.reigns_somebody()
        assert len(candidates.reigning) == 1
        assert all(reign.why for reign in candidates.reigns)
        assert len(await ids(world)) <= 3 * KEPT

    simulate(seed, main, faults=Faults.rough())
