"""Copies the WAL of a snapshot. What is in a slot is told by the footer, so that is read anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shalekv.engine.backup.checking import wal_copy
from shalekv.engine.wal import WalFolder
from shalekv.errors import IllegalState, ShaleError
from shalekv.format.backup_names import Copy, WalCopy
from shalekv.format.footer import Footer
from shalekv.format.footer_codec import read_footer
from shalekv.format.names import WAL_FOLDER, parse_wal_name, wal_name
from shalekv.format.sst_tail import needed_tail
from shalekv.jobs.backup.copy import Copying, CopyLimits, for_each
from shalekv.jobs.backup.plan import wanted_slots
from shalekv.jobs.backup.repository import Repository
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.read.replay import loads_of, read_slot
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

TAIL_BYTES = 64 << 10  # holds the footer unless its keys are long; most objects are smaller


@dataclass(frozen=True, slots=True)
class CopiedLog:
    """The copies in the order of their slots, what they reach up to, and the loads they commit."""

    copies: list[tuple[WalCopy, int]]
    load_ids: frozenset[str]  # of those that are pending in the manifest
    seq: int
    logical_time_ms: int


class LogCopier:
    """Copies what is not there yet."""

    def __init__(
        self,
        source: CasStore,
        repository: Repository,
        there: Mapping[Copy, int],
        progress: Copying,
    ) -> None:
        """`there` are the copies in the repository, with their sizes."""
        self._source = source
        self._repository = repository
        self._there = {
            (copy.wal_id, copy.write_id): (copy, size_bytes)
            for copy, size_bytes in there.items()
            if isinstance(copy, WalCopy)
        }
        self._progress = progress

    async def copy(self, manifest: Manifest, limits: CopyLimits) -> CopiedLog:
        """Copy the slots of this manifest; raises `IllegalState` when one is missing."""
        slots = wanted_slots(manifest)
        sizes = await self._sizes(slots)
        self._progress.expect(len(slots), sum(sizes[wal_id] for wal_id in slots))
        copied: dict[int, WalCopy] = {}
        footers: dict[int, Footer] = {}
        load_ids: set[str] = set()

        async def act(wal_id: int) -> None:
            size_bytes = sizes[wal_id]
            tail = await self._tail(wal_id, size_bytes)
            footer = read_footer(
                wal_name(wal_id), tail, size_bytes, database_id=manifest.database_id
            )
            footers[wal_id] = footer
            if manifest.pending_loads and footer.contents.may_commit_load:
                load_ids.update(await self._load_ids(wal_id, manifest.database_id))
            there = self._there.get((wal_id, footer.properties.write_id))
            if there is None:
                copied[wal_id] = await self._copy(wal_id, tail, size_bytes, manifest.database_id)
                self._progress.copied(size_bytes)
                return
            copied[wal_id], copied_bytes = there
            if copied_bytes != size_bytes:
                message = (
                    f"{copied[wal_id]} has {copied_bytes} bytes, expected {size_bytes}: it is "
                    "damaged. Delete it, and run the command again"
                )
                raise IllegalState(message)
            self._progress.present(size_bytes)

        reset_wal_id = manifest.time_reset_wal_id
        await for_each(slots, act, lambda wal_id: sizes[wal_id], limits)
        return CopiedLog(
            [(copied[wal_id], sizes[wal_id]) for wal_id in slots],
            frozenset(load_ids),
            max((footer.contents.max_seq for footer in footers.values()), default=0),
            max((footer.time_told(reset_wal_id) for footer in footers.values()), default=0),
        )

    async def _sizes(self, slots: range) -> dict[int, int]:
        """The sizes of what is in these slots, and behind them."""
        sizes = await self._list(slots)
        missing = next((wal_id for wal_id in slots if wal_id not in sizes), None)
        if missing is None and await self._is_missed(slots.stop, sizes):
            # A list is read page by page, and slots are filled meanwhile: a second one tells.
            again = await self._list(slots)
            gap = WalFolder(slots.stop, frozenset(again)).first_gap
            was_there = WalFolder(slots.stop, frozenset(sizes)).first_gap == gap
            missing = gap if was_there and await self._is_missed(slots.stop, again) else None
        if missing is not None:
            message = (
                f"{wal_name(missing)} is missing in {self._source.url} although it was written: it "
                "must have been deleted by hand. Put it back, or restore an older backup"
            )
            raise IllegalState(message)
        return sizes

    async def _is_missed(self, first: int, sizes: Mapping[int, int]) -> bool:
        """Whether slots are filled which no writer fills before the first gap."""
        folder = WalFolder(first, frozenset(sizes))
        if max(sizes, default=-1) <= folder.first_gap:
            return False
        current = await StoredManifest(self._source).refresh()
        if current.wal_mode is WalMode.QUORUM:
            return False  # a safekeeper archives several objects at once, and may die meanwhile
        if any(folder.first_gap in left_out for left_out in current.wal_ids_left_out):
            return False  # the log goes on at another place since
        return folder.misses_an_object(width=current.fence_width, last_seen=None)

    async def _list(self, slots: range) -> dict[int, int]:
        start_after = wal_name(slots.start - 1) if slots.start else ""
        listed = self._source.reads.list(WAL_FOLDER, start_after=start_after)
        found = [(parse_wal_name(info.name), info.size_bytes) async for info in listed]
        return {wal_id: size_bytes for wal_id, size_bytes in found if wal_id is not None}

    async def _load_ids(self, wal_id: int, database_id: bytes) -> list[str]:
        """The loads that this object commits."""
        found = await read_slot(self._source, wal_id, database_id)
        if isinstance(found, ShaleError):
            raise found
        return [load.load_id for load in loads_of(found)]

    async def _tail(self, wal_id: int, size_bytes: int) -> bytes:
        """The last bytes of an object, its footer or more; of a small one all."""
        name = wal_name(wal_id)
        if size_bytes <= TAIL_BYTES:
            return (await self._source.reads.get(name)).data
        tail = await self._source.reads.get_range(name, -TAIL_BYTES, TAIL_BYTES)
        needed = needed_tail(name, tail, size_bytes)
        if needed > TAIL_BYTES:
            tail = await self._source.reads.get_range(name, -needed, needed)
        return tail

    async def _copy(self, wal_id: int, tail: bytes, size_bytes: int, database_id: bytes) -> WalCopy:
        name = wal_name(wal_id)
        is_all = len(tail) == size_bytes
        data = tail if is_all else (await self._source.reads.get(name)).data
        run = self._source.runtime.workers.run
        copy = await run(wal_copy, name, data, wal_id, database_id)
        await self._repository.put(str(copy), data)
        return copy
