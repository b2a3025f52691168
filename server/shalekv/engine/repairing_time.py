"""Setting logical time back to the store's clock, after a writer was opened under a wrong one.

The log is opened as ever, which ends the writer that serves; the edit that sets time back is made
under the epoch that was won. If another writer has opened meanwhile it fails, and nothing is
changed (protocol, "Logical time").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import structlog

from shalekv.core.manifest import Manifest
from shalekv.core.snapshot import remove_snapshots
from shalekv.core.time_reset import reset_time
from shalekv.engine.logical_time import first_time, last_time_ms
from shalekv.engine.quorum.links import Links
from shalekv.engine.recover import open_log
from shalekv.manifest.stored import StoredManifest
from shalekv.settings import WriterSettings
from shalekv.store.cas import CasStore

NONCE_BYTES = 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TimeFound:
    """How logical time stands to the store's clock, as far as the object store tells."""

    logical_time_ms: int
    store_now_ms: int

    @property
    def ahead_ms(self) -> int:
        """How far logical time is ahead."""
        return max(0, self.logical_time_ms - self.store_now_ms)


async def look_at_time(store: CasStore, jump_max_s: int) -> TimeFound:
    """Compare logical time with the store's clock.

    Raises `ImplausibleTime` as an opening does, `DatabaseNotFound`, `CorruptObject`, `StoreError`.
    """
    current = await StoredManifest(store).refresh()
    time = await first_time(store, current, jump_max_s)
    return TimeFound(await last_time_ms(store, current), time.store_now_ms)


async def repair_time(store: CasStore, links: Links, jump_max_s: int) -> Manifest:
    """Set logical time back to what the store's clock shows; the manifest that says so.

    A writer that serves is fenced by it, a compactor superseded. Raises as `open_log`.
    """
    settings = WriterSettings(flush_interval_ms=0, clock_jump_max_s=jump_max_s)
    opened = await open_log(store, settings, address="", links=links)
    now_ms = opened.time.store_now_ms
    edit = partial(
        reset_time,
        own=opened.manifest.own,
        now_ms=now_ms,
        last_wal_id=opened.last_wal_id,
        compactor_nonce=store.runtime.random.randbytes(NONCE_BYTES),
    )

    def edit_and_leave(manifest: Manifest) -> Manifest:
        left = remove_snapshots(edit(manifest), {opened.held.snapshot_id})
        return replace(left, writer_address="")

    repaired = await opened.manifest.edit(
        edit_and_leave, lambda m: m.time_reset_wal_id == opened.last_wal_id
    )
    log.info("logical time was set back", ms=now_ms, behind=opened.last_wal_id)
    return repaired
