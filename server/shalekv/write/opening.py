"""Opening a database for writing: carries out what `protocol.opening.step` decides.

Nothing here judges epochs, fences or lists: each effect is one request, or a loop over equal ones,
whose result is the next event (server/docs/protocol.md, "Epochs and fences").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from shalekv.concurrency import in_parallel
from shalekv.errors import (
    DatabaseMismatch,
    OutcomeUnknown,
)
from shalekv.format.block_frame import Codec
from shalekv.protocol.fencing import Occupant, WriterId
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.opening import (
    CreateFence,
    EpochClaimed,
    FenceCreated,
    FenceUnknown,
    FillSlots,
    FinishOpening,
    ListWal,
    LogReplayed,
    ManifestRead,
    Opening,
    OpeningEffect,
    OpeningEvent,
    ReadManifest,
    ReplayLog,
    ReserveWidth,
    SlotsFilled,
    WalListed,
    claim_epoch,
    step,
)
from shalekv.read.origins import check_pins
from shalekv.settings import CacheSettings, QuorumSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache
from shalekv.store.manifests import StoredManifest, WriterManifest, edit_deadline
from shalekv.store.url import UNCHARGED_SCHEMES
from shalekv.write.commit import WalContents
from shalekv.write.logical_time import first_time
from shalekv.write.quorum.links import Links
from shalekv.write.recovery import (
    FencedLog,
    OpeningSnapshot,
    RecoveredLog,
    flush_policy,
    opening_deadline,
    replay_log,
    serve_replayed,
)
from shalekv.write.wal import WAL_BLOCK_BYTES, ObjectStoreWal, list_wal

log = structlog.get_logger()

FILLS_MAX = 8  # slots that are filled at once
NONCE_BYTES = 16


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
    opener = _OpeningExecutor(store, stored, settings, opening_snapshot, cache, disk)
    return await opener.run(address=address, since_epoch=since_epoch)


async def fence_log(store: CasStore) -> WriterManifest:
    """Claim the next epoch, and fence all older writers; replay nothing, and need no SST.

    For a database that is to be deleted. Raises as `open_log`, but no `OriginLost`.
    """
    stored = StoredManifest(store)
    current = await stored.refresh()
    stored.check_cas_mode(current)
    settings = WriterSettings()
    time = await first_time(store, current, settings.clock_jump_max_s)
    opening_snapshot = OpeningSnapshot(store, settings, time)
    opener = _OpeningExecutor(store, stored, settings, opening_snapshot, None, None)
    # No WAL object needs to be kept for it: the snapshot of the claim expires at once.
    _, manifest, _ = await opener.fence("", None, max(time.store_now_ms // 1_000 - 1, 1))
    return manifest


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


class _OpeningExecutor:
    """One opening of a database whose WAL is in the object store."""

    def __init__(
        self,
        store: CasStore,
        stored: StoredManifest,
        settings: WriterSettings,
        opening_snapshot: OpeningSnapshot,
        cache: CacheSettings | None,
        disk: DiskCache | None,
    ) -> None:
        """Nothing is claimed yet."""
        self._store = store
        self._stored = stored
        self._settings = settings
        self._opening_snapshot = opening_snapshot
        self._cache = cache
        self._disk = disk
        self._opening = Opening(store.runtime.random.randbytes(NONCE_BYTES))

    async def run(self, *, address: str, since_epoch: int | None) -> RecoveredLog:
        """Carry out one effect after another until the writer may serve. Raises as `open_log`."""
        expire_time_s = self._opening_snapshot.expire_time_s
        return await self._replay_and_serve(*await self.fence(address, since_epoch, expire_time_s))

    async def fence(
        self, address: str, since_epoch: int | None, expire_time_s: int
    ) -> tuple[ReplayLog, WriterManifest, ObjectStoreWal]:
        """Carry out the effects until older writers are fenced. Return the next one.

        The snapshot that keeps the WAL until then expires at `expire_time_s`.
        """
        claimed = await self._claim(address, since_epoch, expire_time_s)
        event: OpeningEvent = EpochClaimed(claimed)
        self._opening, effects = step(self._opening, event)
        own, current = self._opening.own, self._opening.known
        log.info("epoch won", epoch=own.epoch, manifest_id=current.manifest_id)
        self._opening_snapshot.time.raise_to(current.logical_time_ms)
        manifest = WriterManifest(self._stored, own)
        wal = self._wal(own, current.database_id)
        while True:
            (effect,) = effects
            if isinstance(effect, ReplayLog):
                if not own.is_first:
                    run = self._opening.run
                    log.info("older writers fenced", first_wal_id=run.first, fences=run.width)
                return effect, manifest, wal
            event = await self._execute(effect, manifest, wal)
            self._opening, effects = step(self._opening, event)

    async def _claim(self, address: str, since_epoch: int | None, expire_time_s: int) -> Manifest:
        """Raise the writer epoch by one, and record our nonce with it.

        Half-finished work of other processes in the store is completed first, since lists do not
        show it before.
        """
        await self._store.repair()
        nonce = self._opening.nonce
        edit = partial(
            _claim_epoch,
            nonce=nonce,
            max_parallel_writes=self._settings.max_parallel_writes,
            address=address,
            snapshot_expire_time_s=expire_time_s,
            since_epoch=since_epoch,
        )
        async with opening_deadline(self._store, self._settings):
            return await self._stored.edit(edit, lambda m: m.writer_nonce == nonce)

    def _wal(self, own: WriterId, database_id: bytes) -> ObjectStoreWal:
        return ObjectStoreWal(
            self._store,
            own,
            database_id=database_id,
            block_bytes=WAL_BLOCK_BYTES,
            now_ms=self._opening_snapshot.time.now_ms,
            last_compacted=self._last_compacted,
            codec=Codec[self._settings.wal_codec.name],
        )

    async def _last_compacted(self) -> int | None:
        return (await self._stored.refresh()).wal_id_last_compacted

    async def _execute(
        self, effect: OpeningEffect, manifest: WriterManifest, wal: ObjectStoreWal
    ) -> OpeningEvent:
        """Carry out an effect that is not the last one, and return its result."""
        match effect:
            case ReadManifest():
                return ManifestRead(await self._stored.refresh())
            case ListWal(first):
                return WalListed(await list_wal(self._store, first))
            case CreateFence(slot):
                try:
                    return FenceCreated(await wal.create(slot, WalContents()))
                except OutcomeUnknown:
                    return FenceUnknown()
            case ReserveWidth(width):
                return ManifestRead(await self._reserve(width, manifest))
            case FillSlots(empty):
                return SlotsFilled(await _fill(wal, empty))
        raise ValueError(effect)

    async def _reserve(self, width: int, manifest: WriterManifest) -> Manifest:
        pursuit = self._opening.pursuit
        log.info("fencing ahead of an older writer", gap=pursuit.gap, first=pursuit.first)
        async with edit_deadline(self._store):
            return await manifest.edit(
                lambda m: replace(m, fence_width=max(m.fence_width, width)),
                lambda m: m.fence_width >= width,
            )

    async def _replay_and_serve(
        self, effect: ReplayLog, manifest: WriterManifest, wal: ObjectStoreWal
    ) -> RecoveredLog:
        """Carry out the last two effects, which build what the writer starts from."""
        time = self._opening_snapshot.time
        replayed = await replay_log(
            self._store, manifest, effect.slots.stop, self._settings, self._opening_snapshot
        )
        self._opening, (finish,) = step(self._opening, LogReplayed(replayed.last_seq))
        assert isinstance(finish, FinishOpening)
        last = finish.last_wal_id
        assert last is not None
        policy = flush_policy(
            self._settings,
            max_parallel_writes=self._settings.max_parallel_writes,
            is_charged=not self._store.url.startswith(UNCHARGED_SCHEMES),
        )
        fenced = FencedLog(
            replayed, wal, policy, time, last, last_stored_wal_id=last, first_seq=finish.first_seq
        )
        served = await serve_replayed(
            self._store, manifest, self._settings, fenced, self._cache, self._disk
        )
        self._opening, _ = step(self._opening, ManifestRead(manifest.current))
        return served


async def _fill(wal: ObjectStoreWal, empty: Sequence[int]) -> list[tuple[int, Occupant]]:
    """Create empty objects in slots; return those that others have filled, with what is there."""
    occupied: list[tuple[int, Occupant]] = []
    left = list(empty)

    async def fill() -> None:
        while left:
            slot = left.pop()
            try:
                occupant = await wal.create(slot, WalContents())
            except OutcomeUnknown:
                continue  # it was compacted since, and so filled
            if occupant is not None:
                occupied.append((slot, occupant))

    await in_parallel(fill, min(FILLS_MAX, len(left)))
    return occupied
