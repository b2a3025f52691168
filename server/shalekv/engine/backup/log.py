"""Copies the WAL of a snapshot. What is in a slot is told by the footer, so that is read anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shalekv.core.manifest import Manifest
from shalekv.engine.backup.checking import wal_copy
from shalekv.engine.backup.copying import Copying, CopyLimits, for_each
from shalekv.engine.backup.plan import wanted_slots
from shalekv.engine.backup.repository import Repository
from shalekv.errors import IllegalState
from shalekv.format.backup_names import Copy, WalCopy
from shalekv.format.footer import Footer
from shalekv.format.footer_codec import read_footer
from shalekv.format.names import WAL_FOLDER, parse_wal_name, wal_name
from shalekv.format.sst_tail import needed_tail
from shalekv.store.cas import CasStore

TAIL_BYTES = 64 << 10  # holds the footer unless its keys are long; most objects are smaller


@dataclass(frozen=True, slots=True)
class CopiedLog:
    """The copies in the order of their slots, and what they reach up to."""

    copies: list[tuple[WalCopy, int]]
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
        self._progress.expect(len(slots), sum(sizes.values()))
        copied: dict[int, WalCopy] = {}
        footers: dict[int, Footer] = {}

        async def act(wal_id: int) -> None:
            size_bytes = sizes[wal_id]
            tail = await self._tail(wal_id, size_bytes)
            footer = read_footer(
                wal_name(wal_id), tail, size_bytes, database_id=manifest.database_id
            )
            footers[wal_id] = footer
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

        await for_each(slots, act, lambda wal_id: sizes[wal_id], limits)
        return CopiedLog(
            [(copied[wal_id], sizes[wal_id]) for wal_id in slots],
            max((footer.contents.max_seq for footer in footers.values()), default=0),
            max((footer.properties.logical_time_ms for footer in footers.values()), default=0),
        )

    async def _sizes(self, slots: range) -> dict[int, int]:
        start_after = wal_name(slots.start - 1) if slots.start else ""
        sizes: dict[int, int] = {}
        async for info in self._source.reads.list(WAL_FOLDER, start_after=start_after):
            wal_id = parse_wal_name(info.name)
            if wal_id is not None and wal_id >= slots.stop:
                break
            if wal_id is not None:
                sizes[wal_id] = info.size_bytes
        for wal_id in slots:
            if wal_id not in sizes:
                message = (
                    f"{wal_name(wal_id)} is missing in {self._source.url} although a snapshot "
                    "needs it: it must have been deleted by hand"
                )
                raise IllegalState(message)
        return sizes

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
