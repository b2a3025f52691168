"""Group commit under faults, rivals and ends at any moment: one true answer for every write."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shalekv.core.fencing import WriterId, fenced
from shalekv.core.flush import FlushPolicy
from shalekv.engine.admission import Admission
from shalekv.engine.commit import Receipt, changes_bytes
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.memtable import Memtable
from shalekv.engine.prefix import Prefix
from shalekv.engine.wal import WalSlots
from shalekv.errors import OutcomeUnknown, ShaleError, Stopping
from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World
from tests.unit.engine.running_log import DATABASE_ID, NEWER, OLDER, OWN, Write

ENDS = ("close", "stop", "cancel", "newer writer")


class Trial:
    """One log in one simulated world; every write has a value of its own."""

    def __init__(self, world: World, *, end: str) -> None:
        self.world = world
        self.end = end
        self.random = Random(f"{world.seed}/trial")
        self.memtable = Memtable()
        self.prefix = Prefix(self.memtable, seq=50, wal_id=9)
        self.admission = Admission(
            WriterSettings(queued_bytes_max=1 << 20, queue_wait_ms=5_000),
            memtable_bytes=lambda: self.memtable.size_bytes,
        )
        runtime = world.runtime_for("writer")
        self.log = GroupCommit(
            slots=self.slots("writer", OWN),
            memtable=self.memtable,
            admission=self.admission,
            prefix=self.prefix,
            policy=FlushPolicy(
                max_parallel_writes=self.random.choice([1, 1, 2, 4]),
                interval_ms=self.random.choice([0.0, 50.0]),
                flush_bytes=self.random.choice([1, 2_000, 1 << 20]),
            ),
            clock=runtime.clock,
            next_seq=100,
        )
        self.writes: list[Write] = []
        self.refused = 0

    def slots(self, node: str, own: WriterId) -> WalSlots:
        cas = CasStore(self.world.store_for(node), self.world.runtime_for(node), StoreSettings())
        return WalSlots(cas, own, database_id=DATABASE_ID, block_bytes=4_096, now_ms=lambda: 1)

    async def run(self) -> None:
        node = self.world.node("writer")
        for slot in self.random.sample(range(10, 40), self.random.randrange(8)):
            await self.slots("older", OLDER).create(slot, ())
        async with asyncio.TaskGroup() as tasks:
            log = tasks.create_task(node.run(self.run_log()))
            clients = [tasks.create_task(node.run(self.client(n))) for n in range(6)]
            tasks.create_task(self.end_it(log))
            if self.end == "newer writer":
                await asyncio.wait([log])
                for client in clients:
                    client.cancel()
        await self.world.sleep_ms(3_600_000)  # what is still under way arrives

    async def run_log(self) -> None:
        try:
            await self.log.run()
        except asyncio.CancelledError:
            assert self.end == "cancel"

    async def end_it(self, log: asyncio.Task[None]) -> None:
        await self.world.sleep_ms(self.random.uniform(0, 3_000))
        match self.end:
            case "close":
                self.log.close()
            case "stop":
                self.log.stop(Stopping("stopped by the test"))
            case "cancel":
                log.cancel()
            case "newer writer":
                slots, slot = self.slots("newer", NEWER), self.log.next_wal_id
                while await slots.create(slot, ()) is not None:
                    slot += 1
                await self.world.sleep_ms(self.random.uniform(0, 10_000))
                self.log.stop(fenced(OWN, NEWER.epoch, "the manifest"))  # a log may be idle

    async def client(self, number: int) -> None:
        random = Random(f"{self.world.seed}/client {number}")
        for count in range(40):
            write = Write(b"%d" % random.randrange(10), b"%d.%d" % (number, count))
            size_bytes = changes_bytes(write.changes)
            try:
                if not self.admission.try_admit(size_bytes):
                    await self.admission.wait(size_bytes)
                self.log.submit(write.changes, write.settle)
            except ShaleError:
                self.refused += 1
                return
            self.writes.append(write)
            if random.random() < 0.5:
                await write.outcome()
            await self.world.sleep_ms(random.choice([0, 1, 30, 100]))

    def check(self) -> None:
        """Every write was told once, and what it was told is what is in the store."""
        durable = self.durable()
        for write in self.writes:
            (told,) = write.told
            change = write.changes[0]
            found = durable.get(change.value)
            if isinstance(told, Receipt):
                assert found == (change.key, told.seq, told.wal_id)
                landed = self.memtable.get(change.key)
                assert landed is not None
                assert landed.seq >= told.seq
            elif not isinstance(told, OutcomeUnknown):
                assert found is None, f"{change} was not lost: {told}"
        if self.end == "close" and self.log.is_closing:
            assert all(isinstance(write.told[0], Receipt) for write in self.writes)
        assert self.admission.queued_bytes == 0
        assert self.admission.waiting_bytes == 0
        assert len(self.log.overlay) == 0

    def durable(self) -> dict[bytes, tuple[bytes, int, int]]:
        """Key, number and slot of every value of ours in the store; slots are in order (I4)."""
        found: dict[bytes, tuple[bytes, int, int]] = {}
        last_seq = 0
        for name in self.world.store.names(names.WAL_FOLDER):
            wal_id, data = names.parse_wal_name(name), self.world.store.data(name)
            assert wal_id is not None
            assert data is not None
            entries = list(open_sst(name, data, database_id=DATABASE_ID).entries())
            for entry in entries:
                assert entry.value not in found, "one write in two objects"
                found[entry.value] = (entry.key, entry.seq, wal_id)
            if entries:
                assert min(entry.seq for entry in entries) > last_seq
                last_seq = max(entry.seq for entry in entries)
        return found


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("seed", range(12))
def test_every_write_hears_the_truth_once(seed: int, end: str) -> None:
    """Acknowledged means durable where it was said, lost means nowhere; each is told once."""

    async def main(world: World) -> None:
        trial = Trial(world, end=end)
        await trial.run()
        trial.check()

    simulate(seed, main, faults=Faults.swarm(Random(seed)))
