"""A cache of parts of SSTs on the local disk, shared by the processes of one host.

It never fails a read, and never holds one up for a write: parts that were fetched wait in memory,
bounded, until `run` has written them; what finds no room there is not kept. Whatever the disk
refuses counts as an error, and nothing is written for a while. What was used longest ago goes
first, as far as can be told: a use is noted once between two scans of the folder.

All processes together keep at most `bytes_max`, and a sixteenth more for each process: so much may
be on its way while another one scans. Each file counts as the pages it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from shalekv.runtime import Runtime
from shalekv.settings import MIB, DiskCacheSettings
from shalekv.store.disk_cache_folder import SHARDS, Ages, CachedPart, PartFolder, on_disk
from shalekv.store.files import REAL_FILE_SYSTEM, FileSystem

log = structlog.get_logger()

BATCH_PARTS = 32  # a batch, or one part, is at most this part of the bound
BATCH_BYTES_MAX = 1 * MIB  # written by one call of a worker, unless one part is larger
PART_BYTES_MAX = 32 * MIB
PENDING_BYTES_MAX = 4 * MIB  # waits in memory to be written, unless it is one part
FREED_PARTS = 8  # a scan that finds too much frees this part of the bound
SCAN_PARTS = 4  # after having written this part of the bound, a process scans in any case
BUSY_WAIT_MS = 50  # while another process scans
PAUSE_MS = 30_000  # after an error nothing is written for so long


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """What the cache came to in this process."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    dropped: int = 0  # parts that were fetched and not kept: too large, no room, or after an error
    evicted: int = 0  # by this process
    damaged: int = 0  # files that were not what was written, and are deleted
    errors: int = 0  # refusals of the disk
    held_bytes: int = 0  # by all processes, about


class DiskCache:
    """Parts of SSTs by database, SST and range. `run` has to run for anything to be kept."""

    def __init__(
        self,
        path: Path,
        bytes_max: int,
        runtime: Runtime,
        *,
        filesystem: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        """Nothing is touched before it is asked for."""
        self.bytes_max = bytes_max
        self._counts = DiskCounters()
        self._runtime = runtime
        self._path = path
        token = f"{runtime.random.getrandbits(64):016x}"
        self._folder = PartFolder(path, token, filesystem=filesystem)
        self._batch_bytes_max = bytes_max // BATCH_PARTS
        self._pending: dict[CachedPart, bytes] = {}
        self._pending_bytes = 0
        self._is_pending = asyncio.Event()
        self._writing = asyncio.Lock()
        self._written_since_scan_bytes = 0
        self._paused_until_ms: float | None = None

    @property
    def counters(self) -> DiskCounters:
        """The counters as they stand now."""
        return replace(self._counts)

    @property
    def pending_bytes(self) -> int:
        """Memory of parts that wait to be written."""
        return self._pending_bytes

    async def find(self, parts: Sequence[CachedPart]) -> list[bytes | None]:
        """The parts that are here, in this order; None for the others. Raises nothing."""
        counts = self._counts
        found = [self._pending.get(part) for part in parts]
        missing = [at for at, data in enumerate(found) if data is None]
        if missing:
            wanted = [parts[at] for at in missing]
            looked = await self._runtime.workers.run(self._folder.read, wanted)
            for at, data in zip(missing, looked.found, strict=True):
                found[at] = data
            counts.damaged += looked.damaged
            counts.errors += looked.error is not None
            if looked.damaged:
                log.warning("damaged files in the disk cache deleted", files=looked.damaged)
        hits = [data for data in found if data is not None]
        counts.hits += len(hits)
        counts.misses += len(found) - len(hits)
        counts.hit_bytes += sum(map(len, hits))
        return found

    def keep(self, part: CachedPart, data: bytes) -> None:
        """Write the part in a while, if that is possible. Raises nothing.

        REQUIRES: `data` is known to be what the SST holds.
        """
        if part in self._pending:
            return
        size_bytes = on_disk(part.file_bytes)
        is_too_large = size_bytes > min(self._batch_bytes_max, PART_BYTES_MAX)
        has_no_room = self._pending and self._pending_bytes + len(data) > PENDING_BYTES_MAX
        if is_too_large or has_no_room or self._is_paused():
            self._counts.dropped += 1
            return
        self._pending[part] = data
        self._pending_bytes += len(data)
        self._is_pending.set()

    async def forget(self, parts: Sequence[CachedPart]) -> None:
        """Delete parts that turned out to be damaged. Raises nothing."""
        for part in parts:
            self._drop_pending(part)
        self._counts.damaged += len(parts)
        await self._runtime.workers.run(self._folder.delete, parts)

    async def run(self) -> None:
        """Write what is to be kept, and delete what is too much, until cancelled."""
        async with self._writing:
            await self._keep_on_disk(())  # a scan, and nothing to write
        while True:
            await self._is_pending.wait()
            if not await self.flush():
                await self._runtime.clock.sleep_ms(BUSY_WAIT_MS)

    async def flush(self) -> bool:
        """Write all that waits, as far as the disk takes it; False: another process is deleting."""
        async with self._writing:
            while self._pending:
                if not await self._keep_on_disk(self._batch()):
                    return False
            self._is_pending.clear()
        return True

    def _batch(self) -> list[tuple[CachedPart, bytes]]:
        """What waits longest: as much as one call should write, and at least one part."""
        batch: list[tuple[CachedPart, bytes]] = []
        batch_bytes = 0
        for part, data in self._pending.items():
            batch_bytes += on_disk(part.file_bytes)
            if batch and batch_bytes > min(self._batch_bytes_max, BATCH_BYTES_MAX):
                break
            batch.append((part, data))
        return batch

    async def _keep_on_disk(self, batch: Sequence[tuple[CachedPart, bytes]]) -> bool:
        """Write parts that wait, and let go of them. False: they wait on, for another process."""
        try:
            held_bytes = await self._write(batch)
            if held_bytes is None:
                return False
        except FileNotFoundError:  # somebody deletes the folder at this moment
            self._counts.dropped += len(batch)
        except OSError as error:
            self._pause(error)
            return True
        else:
            size_bytes = _size_on_disk(batch)
            self._written_since_scan_bytes += size_bytes
            self._counts.written += len(batch)
            self._counts.written_bytes += size_bytes
            self._counts.held_bytes = held_bytes
            self._paused_until_ms = None
        for part, _ in batch:
            self._drop_pending(part)
        return True

    async def _write(self, batch: Sequence[tuple[CachedPart, bytes]]) -> int | None:
        """What is kept now; None: another process makes room for it, or finds out if there is."""
        run, folder = self._runtime.workers.run, self._folder
        is_scan_due = not batch or self._written_since_scan_bytes * SCAN_PARTS > self.bytes_max
        if is_scan_due:
            await self._scan(_size_on_disk(batch))
        held_bytes = await run(folder.write, batch, self.bytes_max)
        if held_bytes is None and not is_scan_due and await self._scan(_size_on_disk(batch)):
            held_bytes = await run(folder.write, batch, self.bytes_max)
        return held_bytes

    async def _scan(self, new_bytes: int) -> bool:
        """Look at all files, and delete the oldest if they leave no room for so many bytes more.

        False: another process is doing that.
        """
        run, folder = self._runtime.workers.run, self._folder
        lock = await run(folder.try_lock)
        if lock is None:
            return False
        try:
            before_bytes = await run(folder.begin_scan)
            ages = Ages()
            for shards in SHARDS:
                await run(folder.look, shards, ages)
            left_bytes = ages.total_bytes
            if left_bytes + new_bytes > self.bytes_max:
                too_many_bytes = left_bytes + new_bytes - self.bytes_max
                cut = ages.cut(too_many_bytes + self.bytes_max // FREED_PARTS)
                for shards in SHARDS:
                    files, freed_bytes = await run(folder.evict, shards, cut)
                    left_bytes -= freed_bytes
                    self._counts.evicted += files
            self._counts.held_bytes = await run(folder.end_scan, left_bytes, before_bytes)
        finally:
            lock.release()
        self._written_since_scan_bytes = 0
        return True

    def _drop_pending(self, part: CachedPart) -> None:
        data = self._pending.pop(part, None)
        if data is not None:
            self._pending_bytes -= len(data)

    def _is_paused(self) -> bool:
        until_ms = self._paused_until_ms
        return until_ms is not None and self._runtime.clock.monotonic_ms() < until_ms

    def _pause(self, error: OSError) -> None:
        if self._paused_until_ms is None:  # the first one since it worked
            log.warning(
                "the disk cache takes nothing: see to its folder",
                path=str(self._path),
                error=str(error),
            )
        self._paused_until_ms = self._runtime.clock.monotonic_ms() + PAUSE_MS
        self._counts.errors += 1
        self._counts.dropped += len(self._pending)
        self._pending.clear()
        self._pending_bytes = 0


def _size_on_disk(batch: Sequence[tuple[CachedPart, bytes]]) -> int:
    return sum(on_disk(part.file_bytes) for part, _ in batch)


def open_disk_cache(settings: DiskCacheSettings, runtime: Runtime) -> DiskCache | None:
    """The cache that the settings ask for; None: there is to be none."""
    if not settings.disk_cache_path:
        return None
    path = Path(settings.disk_cache_path).absolute()
    return DiskCache(path, settings.disk_cache_bytes, runtime)
