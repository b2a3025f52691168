"""The end of the log before, when the log of safekeepers begins.

    ... | last | closing fences ...                  c | first | ...
     the log before     ids that are left out          the log of the safekeepers

A closing fence stands in the first free slot of the log before. Its epoch is that of the first
writer with safekeepers, and so it tells a replica that follows that log to look at the manifest. It
is there before the first record of the new log: what replicas show is fresh only as long as nobody
writes at another place.
"""

from __future__ import annotations

from collections.abc import Callable

from shalekv.core.fencing import Verdict, fenced, judge
from shalekv.engine.commit import WalContents
from shalekv.engine.wal import WalSlots, list_wal
from shalekv.manifest.fenced import FencedManifest
from shalekv.settings import WriterSettings
from shalekv.store.cas import CasStore


async def close_log_before(
    store: CasStore, manifest: FencedManifest, now_ms: Callable[[], int]
) -> None:
    """Put a closing fence of the present writer behind the log before, if there was one.

    REQUIRES: no record of the log of the safekeepers is written yet. Raises `Fenced` when a newer
    writer has closed it, `CorruptObject` and `StoreError`.
    """
    if not manifest.current.wal_ids_left_out:
        return  # the log has never been at another place
    slots = WalSlots(
        store,
        manifest.own,
        database_id=manifest.current.database_id,
        block_bytes=WriterSettings().wal_block_bytes,
        now_ms=now_ms,
        last_compacted=_nothing,
    )
    while True:
        first = manifest.current.wal_ids_left_out[-1].start
        wal_id = (await list_wal(store, first)).first_gap
        occupant = await slots.create(wal_id, WalContents())
        if occupant is None:
            return
        if judge(occupant, slots.own) is Verdict.NEWER:
            raise fenced(slots.own, occupant.owner.epoch, f"WAL slot {wal_id}")


async def _nothing() -> None:
    """Fences are never collected: no slot is filled again."""
