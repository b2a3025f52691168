"""A writer that takes loads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from shalekv.clock import LoopClock
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.sst import open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.loads import CommittedLoad, level_rows
from shalekv.protocol.log import FlushPolicy
from shalekv.protocol.manifest import L0, Manifest
from shalekv.protocol.sst_table import SstInfo
from shalekv.protocol.transaction import Change
from shalekv.read.memtable import Memtable
from shalekv.read.replay import Replayed, replay
from shalekv.read.version import LoadPin
from shalekv.settings import KIB, LevelCodec, LevelSettings, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.write.admission import Admission
from shalekv.write.commit import Group, changes_bytes
from shalekv.write.group_commit import GroupCommit
from shalekv.write.ingest import LoadRegistry, Loads
from shalekv.write.pending_writes import PendingWrites
from shalekv.write.recovery import RecoveredLog
from shalekv.write.wal import list_wal
from tests.kit.engine.commits import MemoryDatabase
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import Settlement, yielding_runtime
from tests.kit.store import FaultyStore

SETTINGS = LevelSettings(
    sst_bytes=64 * KIB, block_bytes=4 * KIB, codec=LevelCodec.NONE, filter_bits=10
)


class LoadingWriter(MemoryDatabase):
    """The log of an opening, with its loads."""

    def __init__(self, database: Database, opened: RecoveredLog, store: FaultyStore) -> None:
        super().__init__(Memtable(), seq=opened.last_seq, wal_id=opened.last_wal_id)
        self.database = database
        self.opened = opened
        self.store = store
        self.admission = Admission(WriterSettings(), memtable_bytes=lambda: 0)
        self.log = GroupCommit(
            wal=opened.wal,
            database=self,
            admission=self.admission,
            watermark=self.watermark,
            policy=FlushPolicy(max_parallel_writes=1, interval_ms=0, flush_bytes=1 << 20),
            pending_writes=PendingWrites(self.memtable),
            clock=LoopClock(),
            next_seq=opened.first_seq,
        )
        self.kept: list[LoadPin] = []
        self.landed: list[tuple[CommittedLoad, LoadPin | None]] = []
        registry = LoadRegistry(
            opened.store,
            opened.manifest,
            time=opened.time,
            snapshot_ttl_s=60,
            keep=self.kept.append,
        )
        self.loads = Loads(
            opened.store,
            registry,
            self.log,
            self.admission,
            SETTINGS,
            time=opened.time,
            wait_for_budget=budget_for_all,
        )

    def publish(self, group: Group) -> None:
        super().publish(group)
        if group.load is not None:
            self.landed.append((group.load, self.loads.land(group.load)))

    async def write(self, changes: Sequence[Change]) -> Settlement:
        """Admit a batch, and write it as a load."""
        settlement = Settlement()
        size_bytes = changes_bytes(changes)
        await self.admission.wait(size_bytes)
        await self.loads.write_batch(changes, settlement.settle, size_bytes=size_bytes)
        return settlement


async def budget_for_all() -> None:
    """Return a budget that admits every load."""


@asynccontextmanager
async def loading(
    database: Database, store: FaultyStore | None = None
) -> AsyncIterator[LoadingWriter]:
    """A writer whose log runs; at the end it is closed."""
    store = store or FaultyStore(database.another_store())
    opened = await database.open(store)
    store.requests.clear()
    writer = LoadingWriter(database, opened, store)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.log.run())
        dropping = tasks.create_task(writer.loads.drop_abandoned())
        yield writer
        writer.log.close()
        dropping.cancel()


async def loads_in_wal(database: Database) -> list[CommittedLoad]:
    cas = CasStore(database.store, yielding_runtime(), StoreSettings())
    manifest = await database.manifest()
    folder = await list_wal(cas, 0)
    replayed = Replayed(Memtable(), 0, 0)
    await replay(
        cas,
        range(folder.first_gap),
        database_id=manifest.database_id,
        replayed=replayed,
        parallel_reads=1,
    )
    return replayed.loads


def entries_of(database: Database, manifest: Manifest, load: CommittedLoad) -> list[Entry]:
    found: list[Entry] = []
    for info in level_rows(load):
        name = level_name(info.id)
        sst = open_sst(
            name,
            database.data(name),
            database_id=manifest.database_id,
            checksum=info.checksum,
            assigned_seq=info.max_seq,
        )
        sst.audit()
        found += sst.entries()
    return found


async def file_of(
    database: Database, number: int, entries: Sequence[Entry], ranges: Sequence[Entry] = ()
) -> SstInfo:
    """Return a file that another process has written and that is ready to be loaded."""
    sst_id = bytes.fromhex("0198c0de00007000") + (2**63 + number).to_bytes(8, "big")
    info, data = encoded_file((await database.manifest()).database_id, sst_id, entries, ranges)
    await database.store.create(level_name(sst_id), data)
    return info


def encoded_file(
    database_id: bytes,
    sst_id: bytes,
    entries: Sequence[Entry],
    ranges: Sequence[Entry] = (),
    *,
    block_bytes: int = 64,
) -> tuple[SstInfo, bytes]:
    """Encode an SST for a database to load: its entry in the manifest, and its bytes."""
    name = level_name(sst_id)
    properties = SstProperties(
        name=name,
        database_id=database_id,
        writer_epoch=0,
        writer_nonce=bytes(16),
        write_id=bytes(16),
    )
    data = encode_sst(properties, entries, ranges, block_bytes=block_bytes, filter_bits_per_key=10)
    return open_sst(name, data, database_id=database_id).footer.info(L0), data


async def one_turn() -> None:
    await asyncio.sleep(0)
