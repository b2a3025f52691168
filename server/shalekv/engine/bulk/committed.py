"""Was a load committed? By what the manifest remembers, and by the log that is not compacted."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.engine.levels.parallel import in_parallel
from shalekv.engine.wal import list_wal
from shalekv.errors import ObjectNotFound, ShaleError
from shalekv.protocol.loads import CommittedLoad, find_load
from shalekv.protocol.manifest import Manifest, RecentLoad
from shalekv.read.replay import loads_of, read_slot
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

OBJECTS_AT_ONCE = 4  # of the WAL, each of which is in memory as a whole


async def committed_seq(store: CasStore, stored: StoredManifest, load_id: str) -> int | None:
    """The sequence number of the load, or of a later batch of its stream; None: not committed.

    A load is registered before its record is written, and stays so until the record is compacted:
    so the log is read only when the load, or a later one of its stream, is pending. That alone says
    nothing: its writer may have died before the record. Raises as `StoredManifest.refresh` and
    `replay`.
    """
    while True:
        manifest = await stored.refresh()
        seq = find_load(manifest.recent_loads, load_id)
        if seq is not None or not _may_be_recorded(manifest, load_id):
            return seq
        missing: ObjectNotFound | None = None
        try:
            seq = find_load(await _recorded(store, manifest), load_id)
        except ObjectNotFound as error:
            missing = error
        if seq is not None:
            return seq
        # What was not found counts only if nothing of this part of the log was compacted meanwhile.
        now = await stored.refresh()
        if now.wal_id_last_compacted == manifest.wal_id_last_compacted:
            if missing is not None:
                raise missing
            return None


def _may_be_recorded(manifest: Manifest, load_id: str) -> bool:
    pending = [RecentLoad(load.load_id, 0) for load in manifest.pending_loads]
    return find_load(pending, load_id) is not None


async def _recorded(store: CasStore, manifest: Manifest) -> Sequence[CommittedLoad]:
    """The loads whose records are in the log and not compacted, in any order."""
    first = manifest.first_uncompacted_wal_id
    folder = await list_wal(store, first)
    unread = [*range(first, folder.first_gap)]
    found: list[CommittedLoad] = []

    async def work() -> None:
        while unread:
            sst = await read_slot(store, unread.pop(), manifest.database_id)
            if isinstance(sst, ShaleError):
                raise sst
            if sst.footer.contents.may_commit_load:
                found.extend(loads_of(sst))

    await in_parallel(work, min(len(unread), OBJECTS_AT_ONCE))
    return found
