"""Bulk loads on a database in memory, and what a writer finds there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import NamedTuple

from shalekv.clock import LoopClock
from shalekv.format import names
from shalekv.format.columns import Columns, columns_of
from shalekv.jobs.bulk_load import LoadFiles, LoadJob, commit_by_opening
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.transaction import Change
from shalekv.read.scan import scan_slices
from shalekv.runtime import Runtime
from shalekv.settings import LevelCodec, LevelSettings, LimitSettings, StoreSettings, WriterSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.write.commit import Commit, changes_bytes
from shalekv.write.engine import WriterEngine
from shalekv.write.ingest import Loaded
from shalekv.write.opening import open_log
from tests.kit.engine.collection import AGE_S, TTL_S, CollectedDatabase
from tests.kit.engine.running_log import Settlement
from tests.kit.inline_runtime import InlineWorkers, gathered

LOAD_ID = "monday"
NEVER_MS = 3_600_000
WRITER = WriterSettings(
    flush_interval_ms=0,
    fence_poll_ms=NEVER_MS,
    open_timeout_ms=NEVER_MS,
    snapshot_ttl_s=TTL_S,
)
# Some rows to a file.
LEVELS = LevelSettings.model_construct(
    sst_bytes=300, block_bytes=100, codec=LevelCodec.NONE, filter_bits=10
)
LIMITS = LimitSettings(value_bytes_max=1_000)

State = Mapping[bytes, tuple[bytes, int]]  # key -> value, sequence number


def process(database: CollectedDatabase, store: ObjectStore | None = None) -> CasStore:
    """The store as one more process sees it, whose clock is the real one."""
    runtime = Runtime(LoopClock(), Random(database.random.getrandbits(64)), InlineWorkers())
    return CasStore(store or database.another_store(), runtime, StoreSettings())


def rows_of(pairs: Iterable[tuple[bytes, bytes]], *, deletes: Iterable[bytes] = ()) -> Columns:
    entries = [Entry(key, 0, Kind.PUT, value) for key, value in pairs]
    entries += [Entry(key, 0, Kind.TOMBSTONE) for key in deletes]
    return columns_of(sorted(entries))


async def begin(store: CasStore, load_id: str = LOAD_ID, *, ttl_s: int = TTL_S) -> LoadJob:
    return await LoadJob.begin(store, load_id, levels=LEVELS, limits=LIMITS, ttl_s=ttl_s)


async def load(store: CasStore, rows: Columns, load_id: str = LOAD_ID) -> Loaded:
    """A whole load, as a process does it that opens the database itself."""
    job = await begin(store, load_id)
    if job.committed_seq is not None:
        return Loaded(job.committed_seq, None)

    async def work() -> Loaded:
        files = LoadFiles(store, job.ticket)
        await files.add(rows)
        return await commit_by_opening(store, load_id, await files.finish(), WRITER)

    loaded = await job.guard(work)
    await job.end()
    return loaded


async def write(database: CollectedDatabase, **pairs: bytes) -> int:
    """A commit of these puts by a writer that opens and closes; its sequence number."""
    store = process(database)
    opened = await open_log(store, WRITER, address="")
    engine = WriterEngine(opened, WRITER, LoopClock())
    settlement = Settlement()
    changes = [Change(key.encode(), Kind.PUT, value) for key, value in pairs.items()]
    assert engine.admission.try_admit(changes_bytes(changes))
    engine.log.submit(Commit(changes, engine.log.next_seq, settlement.settle))
    engine.close()
    await engine.run(stop_grace_ms=NEVER_MS)
    await engine.release()
    return (await settlement.receipt()).seq


class Found(NamedTuple):
    """State that a writer finds when it opens now."""

    state: State
    loads: list[str]  # loads whose records it has replayed, oldest first


async def open_again(database: CollectedDatabase) -> Found:
    opened = await open_log(process(database), WRITER, address="")
    engine = WriterEngine(opened, WRITER, LoopClock())
    view = await engine.committed_view()
    slices = await gathered(
        scan_slices(view, start=b"", end=b"", reverse=False, now_ms=database.now_ms)
    )
    await engine.release()
    read = {each.key: (each.value, each.seq) for entries in slices for each in entries}
    return Found(read, [each.load_id for each in opened.loads])


def level_names(database: CollectedDatabase) -> set[str]:
    return {name for name in database.names() if name.startswith(names.LEVELS_FOLDER)}


async def named_files(database: CollectedDatabase) -> set[str]:
    manifest = await database.manifest()
    tables = [manifest.leveled_ssts, *(each.ssts for each in manifest.pending_loads)]
    return {names.level_name(info.id) for table in tables for info in table}


async def collect(database: CollectedDatabase) -> None:
    """All leases expire, and all that is there becomes old; then the collector runs."""
    database.pass_time(TTL_S + AGE_S + 1)
    await database.collecting().collect()
