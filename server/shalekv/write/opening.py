"""Opening a database for writing: win an epoch, fence, replay (protocol, "Epochs and fences").

Safety rests on this order. The epoch is won by compare-and-swap before the WAL is listed. The WAL
is fenced before it is replayed. The fences count only if a manifest that is read after them still
shows this writer, and a c (last compacted WAL object) below them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from shalekv.concurrency import in_parallel
from shalekv.errors import (
    DatabaseMismatch,
    IllegalState,
    OutcomeUnknown,
)
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.protocol.fencing import (
    FenceRun,
    Pursuit,
    SlotVerdict,
    WriterId,
    check_run_counts,
    claim_epoch,
    judge,
)
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.read.origins import check_pins
from shalekv.settings import CacheSettings, QuorumSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache
from shalekv.store.manifests import FencedManifest, StoredManifest, edit_deadline
from shalekv.write.commit import WalContents
from shalekv.write.logical_time import first_time
from shalekv.write.quorum.links import Links
from shalekv.write.recovery import (
    FencedLog,
    OpeningSnapshot,
    RecoveredLog,
    opening_deadline,
    replay_log,
    serve_replayed,
)
from shalekv.write.wal import ObjectStoreWal, WalFolder, list_wal

log = structlog.get_logger()

FILLS_MAX = 8  # slots that are filled at once


async def open_log(
    store: CasStore,
    settings: WriterSettings,
    *,
    address: str,
    since_epoch: int | None = None,
    cache: CacheSettings | None = None,
    disk: DiskCache | None = None,
    links: Links | None = None,
    quorum: QuorumSettings | None = None,
) -> RecoveredLog:
    """Take over the database in `store`. `address` is where this writer can be reached.

    `links` lead to the safekeepers, if the database has its WAL there.

    With the setting `open_once`, a writer that has claimed an epoch since this opening began is not
    fenced. `since_epoch` is the writer epoch at that moment; None: the opening begins now.

    Raises `DatabaseNotFound`, `DatabaseMismatch`, `ImplausibleTime`, `Fenced` when another opens at
    the same time and wins, `ManifestVersionExists` when the other writer must not be fenced,
    `ManifestConflict` after `open_timeout_ms` of conflicts, `OriginLost`, `CorruptObject`,
    `IllegalState`, `StoreError`; with safekeepers also `QuorumUnavailable`, `NotAMember` and
    `LogBehindArchive`.
    """
    stored = StoredManifest(store)
    current = await stored.refresh()
    stored.check_cas_mode(current)
    if not settings.open_once:
        since_epoch = None
    elif since_epoch is None:
        since_epoch = current.writer_epoch
    await check_pins(store, current)
    if current.wal_mode is WalMode.QUORUM and links is not None:
        from shalekv.write.quorum.opening import open_quorum_log  # noqa: PLC0415 - 25 modules

        return await open_quorum_log(
            store,
            stored,
            settings,
            quorum=quorum or QuorumSettings(),
            links=links,
            address=address,
            since_epoch=since_epoch,
            cache=cache,
            disk=disk,
        )
    check_openable(current)
    opening_snapshot = OpeningSnapshot(
        store, settings, await first_time(store, current, settings.clock_jump_max_s)
    )
    manifest = await _win_epoch(
        stored, store, settings, opening_snapshot, address=address, since_epoch=since_epoch
    )
    return await _open_fenced(store, stored, manifest, settings, opening_snapshot, cache, disk)


async def _open_fenced(
    store: CasStore,
    stored: StoredManifest,
    manifest: FencedManifest,
    settings: WriterSettings,
    opening_snapshot: OpeningSnapshot,
    cache: CacheSettings | None,
    disk: DiskCache | None,
) -> RecoveredLog:
    """Fence, replay and finish the opening, after the epoch is won."""
    own, time = manifest.own, opening_snapshot.time
    log.info("epoch won", epoch=own.epoch, manifest_id=manifest.current.manifest_id)
    time.raise_to(manifest.current.logical_time_ms)
    wal = ObjectStoreWal(
        store,
        own,
        database_id=manifest.current.database_id,
        block_bytes=settings.wal_block_bytes,
        now_ms=time.now_ms,
        last_compacted=partial(_last_compacted, stored),
        codec=Codec[settings.wal_codec.name],
    )
    run = await _fence(store, manifest, wal)
    replayed = await replay_log(store, manifest, run.first, settings, opening_snapshot)
    last_wal_id = run.next_slot - 1
    fenced = FencedLog(replayed, wal, time, last_wal_id, last_stored_wal_id=last_wal_id)
    return await serve_replayed(store, manifest, settings, fenced, cache, disk)


def check_openable(manifest: Manifest) -> None:
    """Raise `DatabaseMismatch` if the WAL of the database is not in its object store."""
    if manifest.wal_mode is WalMode.QUORUM:
        raise DatabaseMismatch(
            "this database has its WAL in mode quorum: it cannot be written to without its "
            "safekeepers, as if its WAL were in mode object-store. Use a server that runs (it is "
            "reached at the address of `shalekv manifest`), or start `shalekv serve`"
        )


def _claim_epoch(manifest: Manifest, **claimed: Any) -> Manifest:
    """Claim the epoch as `claim_epoch`, unless the WAL mode has been switched meanwhile (CE15)."""
    check_openable(manifest)
    return claim_epoch(manifest, **claimed)


async def _last_compacted(stored: StoredManifest) -> int | None:
    return (await stored.refresh()).wal_id_last_compacted


async def _win_epoch(
    stored: StoredManifest,
    store: CasStore,
    settings: WriterSettings,
    opening_snapshot: OpeningSnapshot,
    *,
    address: str,
    since_epoch: int | None,
) -> FencedManifest:
    """Raise the writer epoch by one, and record our nonce with it.

    Half-finished work of other processes in the store is completed first, since lists do not show
    it before.
    """
    await store.recover()
    nonce = store.runtime.random.randbytes(16)
    edit = partial(
        _claim_epoch,
        nonce=nonce,
        max_parallel_writes=settings.max_parallel_writes,
        address=address,
        snapshot_expire_time_s=opening_snapshot.expire_time_s,
        since_epoch=since_epoch,
    )
    async with opening_deadline(store, settings):
        won = await stored.edit(edit, lambda m: m.writer_nonce == nonce)
    return FencedManifest(stored, WriterId(won.writer_epoch, nonce))


async def _fence(store: CasStore, manifest: FencedManifest, wal: ObjectStoreWal) -> FenceRun:
    """Put fences into the WAL until no older writer can pass them (I3, F1).

    A compactor may merge the first fences before the last ones are written, again and again (I13).
    After the first such failure each fence is proven at once, so that this does no harm. Raises
    `Fenced` and `IllegalState`.
    """
    is_merged_early = False
    width = manifest.current.fence_width  # that of writers before us, not what we reserve
    while True:
        first_gap = await _find_gap(store, manifest)
        run, pursuit = FenceRun(first=first_gap, width=width), Pursuit.begin(first_gap, width)
        while not run.is_complete:
            try:
                occupant = await wal.create(run.next_slot, WalContents())
            except OutcomeUnknown:
                # The store did not answer, and the slot was compacted since. Whether or not it is
                # ours, the run does not count any more, and another begins behind c.
                break
            verdict = SlotVerdict.OURS if occupant is None else judge(occupant, wal.own)
            newer_epoch = wal.own.epoch if occupant is None else occupant.owner.epoch
            run = run.after(verdict, newer_epoch, wal.own)
            if verdict in (SlotVerdict.OLDER_DATA, SlotVerdict.OLDER_FENCE):
                folder = await _list_from(store, manifest, pursuit.gap)
                pursuit = pursuit.after(verdict, run.first - 1, folder.first_gap)
                run = await _aim(store, manifest, pursuit, width)
            elif is_merged_early:
                run = run.proven_by(await manifest.refresh())
        if run.is_complete and run.first > pursuit.gap:
            await _fill_before(wal, run, await _list_from(store, manifest, pursuit.gap))
        if check_run_counts(run, await manifest.refresh(), wal.own):
            log.info("older writers fenced", first=run.first, width=run.width)
            return run
        is_merged_early = True


async def _aim(store: CasStore, manifest: FencedManifest, pursuit: Pursuit, width: int) -> FenceRun:
    """The next run of fences.

    Ahead of a gap, this opener acts as a writer with a wider window, and the manifest says so
    before anything is written there. The manifest is read after the gap was listed. So a later
    opener finds no earlier gap, and fences every slot into which this one may still write.
    """
    reserved = width + pursuit.first - pursuit.gap
    if reserved > manifest.current.fence_width:
        log.info("fencing ahead of an older writer", gap=pursuit.gap, first=pursuit.first)
        async with edit_deadline(store):
            await manifest.edit(
                lambda m: replace(m, fence_width=max(m.fence_width, reserved)),
                lambda m: m.fence_width >= reserved,
            )
    elif pursuit.first > pursuit.gap:
        await manifest.refresh()
    return FenceRun(first=pursuit.first, width=width)


async def _list_from(store: CasStore, manifest: FencedManifest, slot: int) -> WalFolder:
    """List the slots after `slot`, or after c if that is greater; all before it are filled."""
    return await list_wal(store, max(slot, manifest.current.first_uncompacted_wal_id))


async def _fill_before(wal: ObjectStoreWal, run: FenceRun, folder: WalFolder) -> None:
    """Fill the slots that an older writer left empty before `run`: the log has no gaps (I4)."""
    empty = [slot for slot in range(folder.first_gap, run.first) if slot not in folder.filled]

    async def fill() -> None:
        while empty:
            slot = empty.pop()
            try:
                occupant = await wal.create(slot, WalContents())
            except OutcomeUnknown:
                continue  # it was compacted meanwhile, so it was filled
            if occupant is not None:
                at = FenceRun(first=slot, width=1)
                at.after(judge(occupant, wal.own), occupant.owner.epoch, wal.own)

    await in_parallel(fill, min(FILLS_MAX, len(empty)))


async def _find_gap(store: CasStore, manifest: FencedManifest) -> int:
    """The first empty slot after c. Raises `IllegalState` if it was filled once (I4)."""
    while True:
        current = manifest.current
        folder = await list_wal(store, current.first_uncompacted_wal_id)
        gap = folder.first_gap
        if not folder.misses_an_object(
            width=current.fence_width, last_seen=current.wal_id_last_seen
        ):
            return gap
        # A list is read page by page and may be torn: the slot may have been filled since the
        # first page was read, or compacted and collected. A second list and manifest decide.
        again = await list_wal(store, current.first_uncompacted_wal_id)
        current = await manifest.refresh()
        if again.first_gap == gap and gap >= current.first_uncompacted_wal_id:
            message = (
                f"{names.wal_name(gap)} is missing although it was written: it must have been "
                "deleted by hand. Put it back, or restore the database from a copy"
            )
            raise IllegalState(message)
