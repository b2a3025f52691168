"""A log on a held store, and writes that remember all that they were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random

from shalekv.clock import LoopClock
from shalekv.core.entry import Entry
from shalekv.core.fencing import WriterId
from shalekv.core.flush import FlushPolicy
from shalekv.engine.admission import Admission
from shalekv.engine.commit import Change, Receipt, changes_bytes
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.memtable import Memtable
from shalekv.engine.prefix import Prefix
from shalekv.engine.wal import WalSlots
from shalekv.errors import ShaleError
from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from tests.unit.engine.commits import pairs, put
from tests.unit.engine.held_store import HeldStore
from tests.unit.store.inline_runtime import InlineWorkers

DATABASE_ID = b"d" * 16
OWN = WriterId(5, b"o" * 16)
OLDER = WriterId(4, b"4" * 16)
NEWER = WriterId(6, b"6" * 16)
LOGICAL_TIME_MS = 1_000
Outcome = Receipt | ShaleError


class YieldingClock(LoopClock):
    """A clock on which every wait is over as soon as other tasks have had their turn."""

    def __init__(self) -> None:
        self._now_ms = 0.0

    def monotonic_ms(self) -> float:
        """The sum of all waits."""
        return self._now_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        """Let other tasks run."""
        self._now_ms += duration_ms
        await asyncio.sleep(0)


def yielding_runtime(seed: int = 7) -> Runtime:
    """A runtime whose waits take no time, and whose workers work inline."""
    return Runtime(YieldingClock(), Random(seed), InlineWorkers())


def slots_on(store: ObjectStore, own: WriterId) -> WalSlots:
    """The WAL in `store`, for `own`."""
    cas = CasStore(store, yielding_runtime(), StoreSettings())
    return WalSlots(
        cas, own, database_id=DATABASE_ID, block_bytes=4_096, now_ms=lambda: LOGICAL_TIME_MS
    )


class Write:
    """One commit, and what its caller was told; told twice is a bug."""

    def __init__(self, key: bytes, value: bytes) -> None:
        self.changes = [put(key, value)]
        self.told: list[Outcome] = []
        self._settled = asyncio.Event()

    def settle(self, outcome: Outcome) -> None:
        self.told.append(outcome)
        self._settled.set()

    async def outcome(self) -> Outcome:
        """Wait for it."""
        await self._settled.wait()
        assert len(self.told) == 1
        return self.told[0]

    async def receipt(self) -> Receipt:
        """Wait for it to be durable."""
        outcome = await self.outcome()
        assert isinstance(outcome, Receipt), outcome
        return outcome


class RunningLog:
    """A log and its parts. Its first slot is 10, its first sequence number 100."""

    def __init__(
        self,
        *,
        k: int = 1,
        interval_ms: float = 0,
        flush_bytes: int = 1 << 20,
        store: HeldStore | None = None,
    ) -> None:
        self.store = HeldStore() if store is None else store
        self.memtable = Memtable()
        self.admission = Admission(
            WriterSettings(), memtable_bytes=lambda: self.memtable.size_bytes
        )
        self.prefix = Prefix(self.memtable, seq=50, wal_id=9)
        self.log = GroupCommit(
            slots=slots_on(self.store, OWN),
            memtable=self.memtable,
            admission=self.admission,
            prefix=self.prefix,
            policy=FlushPolicy(
                max_parallel_writes=k, interval_ms=interval_ms, flush_bytes=flush_bytes
            ),
            clock=LoopClock(),
            next_seq=100,
        )
        self.writes: list[Write] = []

    def write(self, key: bytes, value: bytes = b"v") -> Write:
        """Admit and submit a commit of one put."""
        write = Write(key, value)
        assert self.admission.try_admit(changes_bytes(write.changes))
        self.log.submit(write.changes, write.settle)
        self.writes.append(write)
        return write

    async def fill(self, wal_id: int, owner: WriterId, changes: Iterable[Change] = ()) -> None:
        """Somebody else's object takes a slot; without changes it is a fence."""
        entries = sorted(Entry(c.key, 60, c.kind, c.value) for c in changes)
        assert await slots_on(self.store.free, owner).create(wal_id, entries) is None

    def object_of(self, wal_id: int) -> list[tuple[bytes, bytes]]:
        """Keys and values of the object in a slot."""
        return pairs(self.entries_of(wal_id))

    def entries_of(self, wal_id: int) -> list[Entry]:
        """The entries of the object in a slot."""
        name = names.wal_name(wal_id)
        return list(open_sst(name, self.store.data(name), database_id=DATABASE_ID).entries())

    def check_settled(self) -> None:
        """Every write was told once, and all bytes were given back."""
        assert [len(write.told) for write in self.writes] == [1] * len(self.writes)
        assert self.admission.queued_bytes == 0
        assert len(self.log.overlay) == 0
        assert self.log.objects_in_flight == 0


@asynccontextmanager
async def running(log: RunningLog) -> AsyncIterator[RunningLog]:
    """Run the log; at the end close it, answer what is held, and check that all is settled."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(log.log.run())
        yield log
        log.log.close()
        log.store.let_go()
    log.check_settled()


async def quiesce() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
