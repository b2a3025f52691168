"""A log on a held store, and writes that record every outcome they are given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from random import Random

from shalekv.clock import LoopClock
from shalekv.errors import ShaleError
from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.log import FlushPolicy
from shalekv.protocol.transaction import Change, Compare, Operation, Result, Transaction
from shalekv.read.memtable import Memtable
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.write.admission import Admission
from shalekv.write.commit import (
    RECORD_BYTES,
    Commit,
    KeyedRequest,
    Receipt,
    WalContents,
    changes_bytes,
)
from shalekv.write.group_commit import GroupCommit
from shalekv.write.pending_writes import PendingWrites
from shalekv.write.wal import ObjectStoreWal
from tests.kit.engine.commits import NOW_MS, MemoryDatabase, nothing_compacted, pairs, put
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.store import HeldStore

DATABASE_ID = b"d" * 16
OWN = WriterId(5, b"o" * 16)
OLDER = WriterId(4, b"4" * 16)
NEWER = WriterId(6, b"6" * 16)
LOGICAL_TIME_MS = 1_000
TRANSACTION_BYTES = 2_000  # bytes admitted for one
Outcome = Receipt | ShaleError


class YieldingClock(LoopClock):
    """A clock on which every wait is over as soon as other tasks have had their turn."""

    def __init__(self) -> None:
        self._now_ms = 0.0

    def monotonic_ms(self) -> float:
        return self._now_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        self._now_ms += duration_ms
        await asyncio.sleep(0)


def yielding_runtime(seed: int = 7) -> Runtime:
    """A runtime whose waits take no time, and whose workers work inline."""
    return Runtime(YieldingClock(), Random(seed), InlineWorkers())


def slots_on(
    store: ObjectStore,
    own: WriterId,
    last_compacted: Callable[[], Awaitable[int | None]] = nothing_compacted,
) -> ObjectStoreWal:
    cas = CasStore(store, yielding_runtime(), StoreSettings())
    return ObjectStoreWal(
        cas,
        own,
        database_id=DATABASE_ID,
        block_bytes=4_096,
        now_ms=lambda: LOGICAL_TIME_MS,
        last_compacted=last_compacted,
    )


class Settlement:
    """Outcomes that the caller of a commit was given; more than one is a bug."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._settled = asyncio.Event()

    def settle(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._settled.set()

    async def outcome(self) -> Outcome:
        """The outcome, without what is only told to operators."""
        await self._settled.wait()
        (outcome,) = self.outcomes
        if isinstance(outcome, Receipt):
            return outcome._replace(activity=None, bill=None)
        return outcome

    async def told(self) -> Receipt:
        """The whole receipt."""
        await self.receipt()
        (outcome,) = self.outcomes
        assert isinstance(outcome, Receipt)
        return outcome

    async def receipt(self) -> Receipt:
        outcome = await self.outcome()
        assert isinstance(outcome, Receipt), outcome
        return outcome

    async def refusal(self) -> ShaleError:
        outcome = await self.outcome()
        assert isinstance(outcome, ShaleError), outcome
        return outcome


class Write(Settlement):
    """One commit of one put."""

    def __init__(self, key: bytes, value: bytes) -> None:
        super().__init__()
        self.changes = [put(key, value)]


class Transacted(Settlement):
    """One commit that a transaction decides."""

    commit: Commit  # known when it was submitted

    async def results(self) -> Sequence[Result]:
        """Wait for it to be durable; what it has read and counted."""
        decision = (await self.receipt()).decision
        assert decision is not None
        return decision.results


class RunningLog(MemoryDatabase):
    """A log and its parts. Its first slot is 10, its first sequence number 100."""

    def __init__(
        self,
        *,
        k: int = 1,
        interval_ms: float = 0,
        flush_bytes: int = 1 << 20,
        store: HeldStore | None = None,
    ) -> None:
        super().__init__(Memtable(), seq=50, wal_id=9)
        self.store = HeldStore() if store is None else store
        self.admission = Admission(
            WriterSettings(), memtable_bytes=lambda: self.memtable.size_bytes
        )
        self.log = GroupCommit(
            wal=slots_on(self.store, OWN),
            database=self,
            admission=self.admission,
            watermark=self.watermark,
            policy=FlushPolicy(
                max_parallel_writes=k, interval_ms=interval_ms, flush_bytes=flush_bytes
            ),
            pending_writes=PendingWrites(self.memtable),
            clock=LoopClock(),
            next_seq=100,
        )
        self.writes: list[Settlement] = []

    def write(self, key: bytes, value: bytes = b"v") -> Write:
        write = Write(key, value)
        assert self.admission.try_admit(changes_bytes(write.changes))
        self.log.submit(Commit(write.changes, self.log.next_seq, write.settle))
        self.writes.append(write)
        return write

    def transact(
        self,
        *then: Operation,
        compares: Sequence[Compare] = (),
        otherwise: Sequence[Operation] | None = None,
        keyed: KeyedRequest | None = None,
    ) -> Transacted:
        transacted = Transacted()
        record_bytes = 0 if keyed is None else RECORD_BYTES
        assert self.admission.try_admit(TRANSACTION_BYTES + record_bytes)
        transacted.commit = self.log.transact(
            Transaction(then, compares, otherwise),
            transacted.settle,
            size_bytes=TRANSACTION_BYTES,
            keyed=keyed,
        )
        self.writes.append(transacted)
        return transacted

    def newest(self, *keys: bytes) -> list[bytes | None]:
        found = [self.log.pending_writes.get(key) for key in keys]
        return [entry.value if entry and entry.is_visible(NOW_MS) else None for entry in found]

    async def fill(self, wal_id: int, owner: WriterId, changes: Iterable[Change] = ()) -> None:
        """Fill a slot with an object of another writer; without changes it is a fence."""
        entries = sorted(Entry(c.key, 60, c.kind, c.value) for c in changes)
        assert await slots_on(self.store.free, owner).create(wal_id, WalContents(entries)) is None

    def object_of(self, wal_id: int) -> list[tuple[bytes, bytes]]:
        """Keys and values of the object in a slot."""
        return pairs(self.entries_of(wal_id))

    def entries_of(self, wal_id: int) -> Sequence[Entry]:
        """The puts and tombstones of the object in a slot."""
        return self.contents_of(wal_id).points

    def contents_of(self, wal_id: int) -> WalContents:
        name = names.wal_name(wal_id)
        sst = open_sst(name, self.store.data(name), database_id=DATABASE_ID)
        return WalContents([*sst.entries()], [*sst.range_tombstones()], [*sst.system_entries()])

    def check_settled(self) -> None:
        """Check that every write has exactly one outcome, and that all bytes were released."""
        assert [len(write.outcomes) for write in self.writes] == [1] * len(self.writes)
        assert self.admission.queued_bytes == 0
        assert len(self.log.pending_writes) == 0
        assert self.log.groups_in_flight == 0


@asynccontextmanager
async def running(log: RunningLog) -> AsyncIterator[RunningLog]:
    """Run the log; at the end close it, answer what is held, and check that all is settled."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(log.log.run())
        yield log
        log.log.close()
        log.store.release_all()
    log.check_settled()


async def quiesce() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
