"""What of the WAL is not compacted yet, by a list of the store."""

from __future__ import annotations

from shalekv.core.compaction.state import WalState
from shalekv.format import names
from shalekv.store.api import ObjectInfo
from shalekv.store.cas import CasStore


async def list_backlog(store: CasStore, first: int, now_ms: int) -> WalState:
    """The slots from `first` on that are filled in a row; `now_ms` is the store's clock."""
    start_after = names.wal_name(first - 1) if first else ""
    found: dict[int, ObjectInfo] = {}
    async for info in store.reads.list(names.WAL_FOLDER, start_after=start_after):
        wal_id = names.parse_wal_name(info.name)
        if wal_id is not None:
            if wal_id != first + len(found):
                break
            found[wal_id] = info
    sizes = tuple(info.size_bytes for info in found.values())
    age_ms = max(now_ms - found[first].modified_ms, 0) if found else 0
    return WalState(first, len(found), sum(sizes), age_ms, sizes)
