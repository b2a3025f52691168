"""The objects between two logs: of the mode before in the object store, and of safekeepers.

    ... | last | closing fences ...                          | c | first | ...
     the log before   ids that are left out, but for fences    the log of the safekeepers

*c*, an empty object, stands where the log of the safekeepers begins: readers and backups expect
that the object c is there. A closing fence stands in the first free slot of the log before. It
tells a replica that follows it to look at the manifest: its epoch is a new one. So it is there
before the first record of the new log: what replicas show is fresh only as long as nobody writes at
another place.
"""

from __future__ import annotations

from collections.abc import Callable

from shalekv.core.fencing import Verdict, fenced, judge
from shalekv.engine.commit import WalContents
from shalekv.engine.wal import WalSlots, list_wal
from shalekv.manifest.fenced import FencedManifest
from shalekv.settings import WriterSettings
from shalekv.store.cas import CasStore


async def begin_log(store: CasStore, manifest: FencedManifest, now_ms: Callable[[], int]) -> None:
    """Create c and a closing fence of the present writer, before the first record of its log.

    Raises `Fenced` when a newer writer has done so, `CorruptObject` and `StoreError`.
    """
    if not manifest.current.wal_ids_left_out:
        return  # the log has never been at another place
    left_out = manifest.current.wal_ids_left_out[-1]
    slots = WalSlots(
        store,
        manifest.own,
        database_id=manifest.current.database_id,
        block_bytes=WriterSettings().wal_block_bytes,
        now_ms=now_ms,
        last_compacted=_nothing,
    )
    await slots.create(left_out.stop, WalContents())  # or whoever was there before did
    while True:
        wal_id = (await list_wal(store, left_out.start)).first_gap
        occupant = await slots.create(wal_id, WalContents())
        if occupant is None:
            return
        if judge(occupant, slots.own) is Verdict.NEWER:
            raise fenced(slots.own, occupant.owner.epoch, f"WAL slot {wal_id}")


async def _nothing() -> None:
    """Fences are never collected: no slot is filled again."""
