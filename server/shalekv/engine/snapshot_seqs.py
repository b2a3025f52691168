"""Which sequence number each snapshot reads at.

It is that of the last commit in the WAL objects that it keeps, or in its levels if there is none in
those. No manifest says it, so it is read from the objects, once for each manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shalekv.engine.levels.parallel import in_parallel
from shalekv.errors import IllegalState, ObjectNotFound
from shalekv.format import names
from shalekv.format.footer import Footer
from shalekv.format.footer_codec import read_footer
from shalekv.format.sst_tail import needed_tail
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.store.active_manifests import READS_MAX, read_pinned
from shalekv.store.cas import CasStore

TAIL_BYTES = 4_096  # holds the footer of an object whose first and last keys are not very long


class SnapshotSeqs:
    """Remembers what it has found out, for as long as the manifests are active."""

    def __init__(self, store: CasStore) -> None:
        """Nothing is read yet."""
        self._store = store
        self._known: dict[int, int] = {}  # by the ids of manifests

    async def of(self, current: Manifest, snapshots: Sequence[Snapshot]) -> Mapping[bytes, int]:
        """The numbers of these snapshots of the current manifest, by their ids.

        Of those that nobody can read, because they keep no WAL, it is 0.
        Raises `CorruptObject`, `StoreUnavailable`, and `IllegalState` when something is missing:
        then it has expired meanwhile, or was deleted by hand.
        """
        active = {each.manifest_id for each in current.snapshots}
        for manifest_id in self._known.keys() - active:
            del self._known[manifest_id]
        readable = [each for each in snapshots if not each.ssts_only]
        unread = sorted({each.manifest_id for each in readable} - self._known.keys())
        found = {each: self._known[each] for each in active & self._known.keys()}

        async def work() -> None:
            while unread:
                manifest_id = unread.pop()
                found[manifest_id] = await self._read(current, manifest_id)

        await in_parallel(work, min(READS_MAX, len(unread)))
        self._known |= found
        unreadable = dict.fromkeys([each.id for each in snapshots], 0)
        return unreadable | {each.id: found[each.manifest_id] for each in readable}

    async def _read(self, current: Manifest, manifest_id: int) -> int:
        manifest = current
        if manifest_id != current.manifest_id:
            manifest, _ = await read_pinned(self._store, current, manifest_id)
        last = manifest.wal_id_last_seen
        slots = range(manifest.first_uncompacted_wal_id, 0 if last is None else last + 1)
        for wal_id in reversed(slots):
            footer = await self._footer(names.wal_name(wal_id), manifest.database_id)
            if footer.contents.entry_count:  # else it is a fence
                return footer.contents.max_seq
        return manifest.last_compacted_seq

    async def _footer(self, name: str, database_id: bytes) -> Footer:
        reads = self._store.reads
        try:
            size_bytes = (await reads.head(name)).size_bytes
            tail = await reads.get_range(name, -TAIL_BYTES, TAIL_BYTES)
            needed = needed_tail(name, tail, size_bytes)
            if needed > len(tail):
                tail = await reads.get_range(name, -needed, needed)
        except ObjectNotFound:
            message = (
                f"{name} is missing although a snapshot needs it: it must have been deleted by "
                "hand. Put it back, or delete the snapshot"
            )
            raise IllegalState(message) from None
        return read_footer(name, tail, size_bytes, database_id=database_id)
