"""A cache of parts of SSTs on the local disk, shared by the processes of one host.

It never fails a read, and no read waits for a write: fetched parts wait in memory until `run` has
written them; a part that exceeds the bound of that memory is not kept. After an error of the disk
nothing is written for a while. The least recently used parts are evicted first; this is
approximate, since a use is recorded once between two scans of the folder.

All processes together keep at most `bytes_max`, and a sixteenth of it more for each process, which
may be writing as much while another one scans. Each file counts as the pages it occupies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from shalekv.runtime import Runtime
from shalekv.settings import MIB, DiskCacheSettings
from shalekv.store.disk_cache_folder import (
    SHARDS,
    Ages,
    CachedPart,
    PartFolder,
    batch_on_disk,
    size_on_disk,
)
from shalekv.store.files import REAL_FILE_SYSTEM, FileSystem

log = structlog.get_logger()

BATCH_PARTS = 32  # a batch, or one part, is at most this fraction of the bound
BATCH_BYTES_MAX = 1 * MIB  # written by one call of a worker, unless one part is larger
PART_BYTES_MAX = 32 * MIB
PENDING_BYTES_MAX = 4 * MIB  # most that waits in memory to be written, unless it is one part
FREED_PARTS = 8  # a scan that finds too much frees this fraction of the bound
SCAN_PARTS = 4  # a process scans after it has written this fraction of the bound, at the latest
BUSY_WAIT_MS = 50  # wait while another process scans
PAUSE_MS = 30_000  # time without writes after an error


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """Counters of the cache in this process."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    dropped: int = 0  # fetched parts that were not kept: too large, over budget, or after an error
    evicted: int = 0  # by this process
    damaged: int = 0  # files that differed from what was written, and were deleted
    errors: int = 0  # errors of the disk
    held_bytes: int = 0  # by all processes, approximately


class DiskCache:
    """Parts of SSTs by database, SST and range. Nothing is written unless `run` is running."""

    def __init__(
        self,
        path: Path,
        bytes_max: int,
        runtime: Runtime,
        *,
        filesystem: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        """Touch nothing on the disk yet."""
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
        self._write_lock = asyncio.Lock()
        self._written_since_scan_bytes = 0
        self._paused_until_ms: float | None = None

    @property
    def counters(self) -> DiskCounters:
        """A copy of the counters."""
        return replace(self._counts)

    @property
    def pending_bytes(self) -> int:
        """Bytes in memory of parts that wait to be written."""
        return self._pending_bytes

    async def find(self, parts: Sequence[CachedPart]) -> list[bytes | None]:
        """Return the cached parts in this order, and None for each of the others. Never raises."""
        counts = self._counts
        found = [self._pending.get(part) for part in parts]
        missing = [at for at, data in enumerate(found) if data is None]
        if missing:
            wanted = [parts[at] for at in missing]
            result = await self._runtime.workers.run(self._folder.read, wanted)
            for at, data in zip(missing, result.found, strict=True):
                found[at] = data
            counts.damaged += result.damaged
            counts.errors += result.error is not None
            if result.damaged:
                log.warning("damaged files in the disk cache deleted", files=result.damaged)
        hits = [data for data in found if data is not None]
        counts.hits += len(hits)
        counts.misses += len(found) - len(hits)
        counts.hit_bytes += sum(map(len, hits))
        return found

    def keep(self, part: CachedPart, data: bytes) -> None:
        """Queue a part to be written later, if the budget allows it. Never raises.

        REQUIRES: `data` was verified to be what the SST holds.
        """
        if part in self._pending:
            return
        size_bytes = size_on_disk(part.file_bytes)
        is_too_large = size_bytes > min(self._batch_bytes_max, PART_BYTES_MAX)
        is_over_budget = self._pending and self._pending_bytes + len(data) > PENDING_BYTES_MAX
        if is_too_large or is_over_budget or self._is_paused():
            self._counts.dropped += 1
            return
        self._pending[part] = data
        self._pending_bytes += len(data)
        self._is_pending.set()

    async def forget(self, parts: Sequence[CachedPart]) -> None:
        """Delete parts that turned out to be damaged. Never raises."""
        for part in parts:
            self._drop_pending(part)
        self._counts.damaged += len(parts)
        await self._runtime.workers.run(self._folder.delete, parts)

    async def run(self) -> None:
        """Write queued parts, and evict what exceeds the bound, until cancelled."""
        async with self._write_lock:
            await self._keep_on_disk(())  # a scan, and nothing to write
        while True:
            await self._is_pending.wait()
            if not await self.flush():
                await self._runtime.clock.sleep_ms(BUSY_WAIT_MS)

    async def flush(self) -> bool:
        """Write all queued parts; return False if some stay queued, while another process evicts.

        Parts that the disk refuses are dropped.
        """
        async with self._write_lock:
            while self._pending:
                if not await self._keep_on_disk(self._batch()):
                    return False
            self._is_pending.clear()
        return True

    def _batch(self) -> list[tuple[CachedPart, bytes]]:
        """Return the oldest queued parts: as many as one call should write, and at least one."""
        batch: list[tuple[CachedPart, bytes]] = []
        batch_bytes = 0
        for part, data in self._pending.items():
            batch_bytes += size_on_disk(part.file_bytes)
            if batch and batch_bytes > min(self._batch_bytes_max, BATCH_BYTES_MAX):
                break
            batch.append((part, data))
        return batch

    async def _keep_on_disk(self, batch: Sequence[tuple[CachedPart, bytes]]) -> bool:
        """Write queued parts and remove them from the queue.

        Return False if they stay there, since another process evicts or scans.
        """
        try:
            held_bytes = await self._write(batch)
            if held_bytes is None:
                return False
        except FileNotFoundError:  # the folder is being deleted at this moment
            self._counts.dropped += len(batch)
        except OSError as error:
            self._pause(error)
            return True
        else:
            size_bytes = batch_on_disk(batch)
            self._written_since_scan_bytes += size_bytes
            self._counts.written += len(batch)
            self._counts.written_bytes += size_bytes
            self._counts.held_bytes = held_bytes
            self._paused_until_ms = None
        for part, _ in batch:
            self._drop_pending(part)
        return True

    async def _write(self, batch: Sequence[tuple[CachedPart, bytes]]) -> int | None:
        """Write a batch; return the bytes that all processes keep now, about.

        None: nothing was written, because another process is scanning to find or make space.
        """
        run, folder = self._runtime.workers.run, self._folder
        is_scan_due = not batch or self._written_since_scan_bytes * SCAN_PARTS > self.bytes_max
        if is_scan_due:
            await self._scan(batch_on_disk(batch))
        held_bytes = await run(folder.write, batch, self.bytes_max)
        if held_bytes is None and not is_scan_due and await self._scan(batch_on_disk(batch)):
            held_bytes = await run(folder.write, batch, self.bytes_max)
        return held_bytes

    async def _scan(self, new_bytes: int) -> bool:
        """Scan all files; evict the least recently used if `new_bytes` more exceed the bound.

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
                await run(folder.collect_ages, shards, ages)
            left_bytes = ages.total_bytes
            if left_bytes + new_bytes > self.bytes_max:
                too_many_bytes = left_bytes + new_bytes - self.bytes_max
                eviction = ages.eviction(too_many_bytes + self.bytes_max // FREED_PARTS)
                for shards in SHARDS:
                    files, freed_bytes = await run(folder.evict, shards, eviction)
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
        if self._paused_until_ms is None:  # the first error since the last success
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


def open_disk_cache(settings: DiskCacheSettings, runtime: Runtime) -> DiskCache | None:
    """Open the cache of the settings; return None if they name no folder."""
    if not settings.disk_cache_path:
        return None
    path = Path(settings.disk_cache_path).absolute()
    return DiskCache(path, settings.disk_cache_bytes, runtime)
