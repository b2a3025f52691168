"""A log in a simulated world: clients that write to it, rivals, and an end at any moment."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random

from shalekv.core.fencing import WriterId, fenced
from shalekv.core.flush import FlushPolicy
from shalekv.engine.admission import Admission
from shalekv.engine.commit import WalContents
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.memtable import Memtable
from shalekv.engine.prefix import Prefix
from shalekv.engine.wal import WalSlots
from shalekv.errors import Stopping
from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from tests.kit.engine.commits import newest_state, nothing_compacted
from tests.kit.engine.running_log import DATABASE_ID, NEWER, OLDER, OWN
from tests.sim.world import World

ENDS = ("close", "stop", "cancel", "newer writer")


class Trial(ABC):
    """One log in one simulated world, and clients that a subclass sends."""

    def __init__(self, world: World, *, end: str, clients: int) -> None:
        self.world = world
        self.end = end
        self.clients = clients
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
            state=lambda overlay, _below: newest_state(overlay, self.memtable, self.prefix),
            clock=runtime.clock,
            next_seq=100,
        )

    @abstractmethod
    async def client(self, number: int) -> None:
        """One client from its first write to its last."""

    def slots(self, node: str, own: WriterId) -> WalSlots:
        """The WAL as a process on this node sees it."""
        cas = CasStore(self.world.store_for(node), self.world.runtime_for(node), StoreSettings())
        return WalSlots(
            cas,
            own,
            database_id=DATABASE_ID,
            block_bytes=4_096,
            now_ms=lambda: 1,
            last_compacted=nothing_compacted,
        )

    async def run(self) -> None:
        """Let everybody do what they do, until the log has ended and all has arrived."""
        node = self.world.node("writer")
        for slot in self.random.sample(range(10, 40), self.random.randrange(8)):
            await self.slots("older", OLDER).create(slot, WalContents())
        async with asyncio.TaskGroup() as tasks:
            log = tasks.create_task(node.run(self._run_log()))
            clients = [tasks.create_task(node.run(self.client(n))) for n in range(self.clients)]
            tasks.create_task(self._end_it(log))
            if self.end == "newer writer":
                await asyncio.wait([log])
                for client in clients:
                    client.cancel()
        await self.world.sleep_ms(3_600_000)  # what is still under way arrives

    def objects(self) -> Mapping[int, WalContents]:
        """What the WAL objects in the store hold, by slot."""
        found = {}
        for name in self.world.store.names(names.WAL_FOLDER):
            wal_id, data = names.parse_wal_name(name), self.world.store.data(name)
            assert wal_id is not None
            assert data is not None
            sst = open_sst(name, data, database_id=DATABASE_ID)
            found[wal_id] = WalContents(
                [*sst.entries()], [*sst.range_tombstones()], [*sst.system_entries()]
            )
        return found

    def check_nothing_is_left(self) -> None:
        """All bytes were given back, and nothing waits or lies over the memtable."""
        assert self.admission.queued_bytes == 0
        assert self.admission.waiting_bytes == 0
        assert len(self.log.overlay) == 0
        assert self.log.overlay.range_tombstones == []

    async def _run_log(self) -> None:
        try:
            await self.log.run()
        except asyncio.CancelledError:
            assert self.end == "cancel"

    async def _end_it(self, log: asyncio.Task[None]) -> None:
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
                while await slots.create(slot, WalContents()) is not None:
                    slot += 1
                await self.world.sleep_ms(self.random.uniform(0, 10_000))
                self.log.stop(fenced(OWN, NEWER.epoch, "the manifest"))  # a log may be idle
