"""Opening a database for writing: win an epoch, fence, replay (protocol, "Epochs and fences").

The order is the safety: the epoch is won by compare-and-swap before the WAL is listed; the WAL is
fenced before it is replayed; and the fences count only if a manifest that is read after them
still shows this writer and a c below them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from shalekv.core.fencing import (
    FenceRun,
    Verdict,
    WriterId,
    check_run_counts,
    claim_epoch,
    finish_opening,
    first_seq_of_writer,
    is_opening_finished,
    judge,
)
from shalekv.core.loads import drop_unrecorded
from shalekv.core.manifest import Manifest, WalMode
from shalekv.core.tree import Tree
from shalekv.engine.commit import WalContents
from shalekv.engine.levels.held_tree import HeldTree
from shalekv.engine.levels.ssts import LevelSsts
from shalekv.engine.logical_time import LogicalTime
from shalekv.engine.memtable import Memtable
from shalekv.engine.origin_pins import check_pins
from shalekv.engine.replay import Replayed, replay
from shalekv.engine.tree_keeper import SNAPSHOT_ID_BYTES
from shalekv.engine.wal import WalSlots, list_wal
from shalekv.engine.writer_engine import OpenedLog
from shalekv.errors import (
    DatabaseMismatch,
    IllegalState,
    ManifestConflict,
    OutcomeUnknown,
)
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.manifest.fenced import FencedManifest
from shalekv.manifest.named import named_manifest
from shalekv.manifest.stored import StoredManifest
from shalekv.settings import CacheSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache

log = structlog.get_logger()


async def open_log(
    store: CasStore,
    settings: WriterSettings,
    *,
    address: str,
    retry: bool = True,
    cache: CacheSettings | None = None,
    disk: DiskCache | None = None,
) -> OpenedLog:
    """Take over the database in `store`. `address` is where this writer can be reached.

    Raises `DatabaseNotFound`, `DatabaseMismatch`, `Fenced` when another opens at the same time
    and wins, `ManifestVersionExists` on a conflict if not `retry`, `ManifestConflict` after
    `open_timeout_ms` of conflicts, `CorruptObject`, `IllegalState`, `StoreError`.
    """
    stored = StoredManifest(store)
    manifest = await _win_epoch(stored, store, settings, address=address, retry=retry)
    own = manifest.own
    now_ms, floor_ms = await store.reads.now_ms(), manifest.current.logical_time_ms
    log.info("epoch won", epoch=own.epoch, manifest_id=manifest.current.manifest_id)
    time = LogicalTime(store.runtime.clock, store_now_ms=now_ms, floor_ms=floor_ms)
    slots = WalSlots(
        store,
        own,
        database_id=manifest.current.database_id,
        block_bytes=settings.wal_block_bytes,
        now_ms=time.now_ms,
        last_compacted=partial(_last_compacted, stored),
        codec=Codec[settings.wal_codec.name],
    )
    run = await _fence(store, manifest, slots)
    current = manifest.current
    replayed = await _replay(store, current, run.first, settings)
    time.raise_to(replayed.logical_time_ms)
    last_wal_id = run.next_slot - 1
    first_seq = first_seq_of_writer(current, replayed.last_seq)
    held = await _serve_levels(
        store,
        manifest,
        settings,
        cache or CacheSettings(),
        disk,
        finish=partial(finish_opening, own=own, last_wal_id=last_wal_id, first_seq=first_seq),
        loads=[load.load_id for load in replayed.loads],
    )
    return OpenedLog(
        store=store,
        held=held,
        manifest=manifest,
        slots=slots,
        memtable=replayed.memtable,
        time=time,
        last_wal_id=last_wal_id,
        last_seq=replayed.last_seq,
        first_seq=first_seq,
        objects_replayed=replayed.objects,
        records=replayed.records,
        loads=replayed.loads,
    )


async def _replay(
    store: CasStore, current: Manifest, end_wal_id: int, settings: WriterSettings
) -> Replayed:
    """What is in the log from the first slot that is not compacted to the one before `end_wal_id`.

    A load sets aside what memory holds that is older.
    """
    memtable = Memtable(segment_bytes=settings.memtable_segment_bytes)
    replayed = Replayed(
        memtable,
        current.last_compacted_seq,
        current.logical_time_ms,
        land_load=lambda load: memtable.set_aside(load.seq),
    )
    await replay(
        store,
        range(current.first_uncompacted_wal_id, end_wal_id),
        database_id=current.database_id,
        replayed=replayed,
        parallel_reads=settings.replay_parallel_reads,
    )
    return replayed


async def _serve_levels(
    store: CasStore,
    manifest: FencedManifest,
    settings: WriterSettings,
    cache: CacheSettings,
    disk: DiskCache | None,
    *,
    finish: Callable[..., Manifest],
    loads: Sequence[str],
) -> HeldTree:
    """The last edit of an opening, and the levels that it protects.

    Of the loads that are pending, those that no record commits (`loads` are the others) go.
    """
    own = manifest.own
    snapshot_id = store.runtime.random.randbytes(SNAPSHOT_ID_BYTES)
    expire_time_s = await store.reads.now_ms() // 1_000 + settings.snapshot_ttl_s

    def edit(before: Manifest) -> Manifest:
        finished = finish(before, snapshot_id=snapshot_id, snapshot_expire_time_s=expire_time_s)
        return drop_unrecorded(finished, loads)

    async with _deadline(store, settings):
        served = await manifest.edit(
            edit, partial(is_opening_finished, own=own, snapshot_id=snapshot_id)
        )
    # The levels may hold more by now than those that the replay went on from: never less.
    named = await named_manifest(store, served, snapshot_id)
    tree = await store.runtime.workers.run(Tree.of, named)
    ssts = LevelSsts(store, database_id=served.database_id, settings=cache, disk=disk)
    ssts.origins.learn(named.origins)
    await check_pins(store, named)
    return HeldTree(tree, ssts, snapshot_id)


def check_openable(manifest: Manifest) -> None:
    """Refuse a database that was created to be used in another way: `DatabaseMismatch`."""
    if manifest.wal_mode is not WalMode.OBJECT_STORE:
        message = (
            f"this database has its WAL in mode {manifest.wal_mode.name.lower()}, and must not be "
            "opened with the WAL in the object store"
        )
        raise DatabaseMismatch(message)


async def _last_compacted(stored: StoredManifest) -> int | None:
    return (await stored.refresh()).wal_id_last_compacted


async def _win_epoch(
    stored: StoredManifest,
    store: CasStore,
    settings: WriterSettings,
    *,
    address: str,
    retry: bool,
) -> FencedManifest:
    """Raise the writer epoch by one and put our nonce beside it.

    What others have left half done is completed first: nobody lists what is not there yet.
    """
    current = await stored.refresh()
    check_openable(current)
    stored.check_cas_mode(current)
    await store.recover()
    nonce = store.runtime.random.randbytes(16)
    now_s = await store.reads.now_ms() // 1000
    edit = partial(
        claim_epoch,
        nonce=nonce,
        max_parallel_writes=settings.max_parallel_writes,
        address=address,
        snapshot_expire_time_s=now_s + settings.open_snapshot_ttl_s,
    )
    async with _deadline(store, settings):
        won = await stored.edit(edit, lambda m: m.writer_nonce == nonce, retry=retry)
    return FencedManifest(stored, WriterId(won.writer_epoch, nonce))


@asynccontextmanager
async def _deadline(store: CasStore, settings: WriterSettings) -> AsyncIterator[None]:
    """Bounds an edit of the manifest, which otherwise goes on until it wins."""
    try:
        async with asyncio.timeout(settings.open_timeout_ms / 1000):
            yield
    except TimeoutError:
        message = (
            f"{store.url}: the manifest could not be edited within {settings.open_timeout_ms} ms, "
            "because the store did not answer or other processes edited it first. Try again later"
        )
        raise ManifestConflict(message) from None


async def _fence(store: CasStore, manifest: FencedManifest, slots: WalSlots) -> FenceRun:
    """Put fences into the WAL until no older writer can pass them (I3, F1).

    Raises `Fenced` and `IllegalState`.
    """
    while True:
        first_gap = await _find_gap(store, manifest)
        run = FenceRun(first=first_gap, width=manifest.current.fence_width)
        while not run.is_complete:
            try:
                occupant = await slots.create(run.next_slot, WalContents())
            except OutcomeUnknown:
                # The store did not answer, and the slot was compacted since: whether it is ours or
                # not, the run does not count any more, and another begins behind c.
                break
            verdict = Verdict.OURS if occupant is None else judge(occupant, slots.own)
            newer_epoch = slots.own.epoch if occupant is None else occupant.owner.epoch
            run = run.after(verdict, newer_epoch, slots.own)
            if verdict in (Verdict.OLDER_DATA, Verdict.OLDER_FENCE):
                # An older writer may be far ahead by now. Followed slot by slot, with two requests
                # for each, one under load might never be caught up with.
                ahead = await list_wal(store, run.first)
                run = FenceRun(first=ahead.first_gap, width=run.width)
        if check_run_counts(run, await manifest.refresh(), slots.own):
            log.info("older writers fenced", first=run.first, width=run.width)
            return run


async def _find_gap(store: CasStore, manifest: FencedManifest) -> int:
    """The first slot after c that is not filled. Raises `IllegalState` when it was once (I4)."""
    while True:
        current = manifest.current
        folder = await list_wal(store, current.first_uncompacted_wal_id)
        gap = folder.first_gap
        if not folder.misses_an_object(
            width=current.fence_width, last_seen=current.wal_id_last_seen
        ):
            return gap
        # A list is read page by page and may be torn: the slot may have been filled since the
        # first page was read, or compacted and collected. A second list and manifest tell.
        again = await list_wal(store, current.first_uncompacted_wal_id)
        current = await manifest.refresh()
        if again.first_gap == gap and gap >= current.first_uncompacted_wal_id:
            message = (
                f"{names.wal_name(gap)} is missing although it was written: it must have been "
                "deleted by hand. Put it back, or restore the database from a copy"
            )
            raise IllegalState(message)
