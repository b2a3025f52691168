"""Setting logical time back to the store's clock, after a writer was opened under a wrong clock.

The log is opened as usual, which fences the serving writer. The edit that sets time back is made
under the epoch that was won. If another writer has opened meanwhile, the edit fails, and nothing is
changed (protocol, "Logical time").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from shalekv.protocol.compaction.publish import claim_compactor_epoch
from shalekv.protocol.fencing import WriterId, check_owner
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import has_snapshot, remove_snapshots
from shalekv.settings import CLOCK_JUMP_MAX_S, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.logical_time import first_time, last_time_ms
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import Links

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TimeFound:
    """Logical time, and the store's clock at the same moment."""

    logical_time_ms: int
    store_now_ms: int
    is_whole: bool = True  # False: safekeepers may hold later times, which were not read

    @property
    def ahead_ms(self) -> int:
        """Milliseconds by which logical time is ahead; 0 if it is not."""
        return max(0, self.logical_time_ms - self.store_now_ms)

    @property
    def needs_repair(self) -> bool:
        """True if logical time is more than `CLOCK_JUMP_MAX_S` ahead."""
        return self.ahead_ms > CLOCK_JUMP_MAX_S * 1_000


async def read_time(store: CasStore, jump_max_s: int) -> TimeFound:
    """Compare logical time with the store's clock, as far as the object store contains the log.

    Raises `ImplausibleTime` as an opening does, `DatabaseNotFound`, `CorruptObject`, `StoreError`.
    """
    current = await StoredManifest(store).refresh()
    time = await first_time(store, current, jump_max_s)
    last_ms = await last_time_ms(store, current)
    return TimeFound(last_ms, time.store_now_ms, is_whole=current.is_log_in_store)


def reset_time(manifest: Manifest, own: WriterId, *, now_ms: int, last_wal_id: int) -> Manifest:
    """Edit a manifest so that logical time is `now_ms`, milliseconds. Raises `Fenced`.

    `last_wal_id` is the last slot of `own`, whose fences are in place. Everything that an older
    writer has put into the log, or still will, is before that slot, and its times do not count any
    more. A compactor that has read them is superseded. REQUIRES: `own` has finished its opening,
    and has written nothing.
    """
    check_owner(manifest, own)
    recent = (
        replace(load, logical_time_ms=min(load.logical_time_ms, now_ms))
        for load in manifest.recent_loads
    )
    return replace(
        claim_compactor_epoch(manifest, own.nonce),
        logical_time_ms=now_ms,
        time_reset_wal_id=last_wal_id,
        recent_loads=tuple(recent),
        loads_forgotten_ms=min(manifest.loads_forgotten_ms, now_ms),
    )


async def repair_time(store: CasStore, links: Links, jump_max_s: int) -> TimeFound:
    """Set logical time back to the store's clock if it `needs_repair`; returns what it was.

    A serving writer is fenced in any case; a repair also supersedes the compactor. Raises as
    `open_log`.
    """
    settings = WriterSettings(flush_interval_ms=0, clock_jump_max_s=jump_max_s)
    opened = await open_log(store, settings, address="", links=links)
    found = TimeFound(opened.time.now_ms(), opened.time.store_now_ms)
    own, snapshot_id, last_wal_id = (
        opened.manifest.own,
        opened.version.snapshot_id,
        opened.last_wal_id,
    )

    def edit(manifest: Manifest) -> Manifest:
        left = replace(remove_snapshots(manifest, {snapshot_id}), writer_address="")
        if not found.needs_repair:
            return left
        return reset_time(left, own, now_ms=found.store_now_ms, last_wal_id=last_wal_id)

    def landed(manifest: Manifest) -> bool:
        is_reset = manifest.time_reset_wal_id == last_wal_id
        return (is_reset or not found.needs_repair) and not has_snapshot(manifest, snapshot_id)

    await opened.manifest.edit(edit, landed)
    if found.needs_repair:
        log.info("logical time was set back", ms=found.store_now_ms, behind=last_wal_id)
    return found
