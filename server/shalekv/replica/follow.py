"""Following the log: a replica polls for the next WAL object, and applies it.

    GET wal/<next> --- there --> apply, and ask for those after it, more of them at once
         |  ^
     not there |  wait: `poll_interval_ms`, longer while nothing happens, less when a read asks
         +--+

See server/docs/protocol.md, "Readers". Where safekeepers hold the log, its end comes from them, and
the bucket is polled only while that does not work (`replica.tail`). Each poll then asks the
safekeepers how recent the applied state is.

An answer of the store is valid only if nothing can have been deleted when it was given: the
replica's own snapshot cannot have expired, or is in a manifest that was listed after the answer.
Without a snapshot, that manifest must have compacted nothing from the slot on. Otherwise the
version of that manifest holds more than memory, and the log continues behind it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from shalekv.concurrency import IdlePoll, SingleFlight
from shalekv.errors import CorruptObject, ObjectNotFound, ShaleError, StoreError
from shalekv.format import names
from shalekv.format.columns import Section
from shalekv.format.sst import Sst, open_sst
from shalekv.protocol.quorum_records import Record
from shalekv.protocol.tail import AppliedPosition, News
from shalekv.read.memtable import Memtable
from shalekv.read.replay import read_slot
from shalekv.read.version_set import VersionSet
from shalekv.replica.apply import LogApplier
from shalekv.replica.tail import TailReader
from shalekv.settings import ReaderSettings, SnapshotChoice
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.logical_time import StoreTime
from shalekv.write.wal import list_wal

log = structlog.get_logger()

EMPTY_POLLS = 8  # polls at the first interval, before it begins to double
CORRUPT_POLLS = 3  # reads of a damaged object: it may be intact in the store
NEVER_MS = 1 << 40  # some 35 years: the age of a state that may lack any acknowledged write


@dataclass(slots=True)
class FollowerCounts:
    """Counters of a follower."""

    applied: int = 0  # WAL objects
    empty_looks: int = 0
    gaps: int = 0
    gap_ms: float = 0


class Follower:
    """Applies what the writer makes durable, in slot order (I4, I6)."""

    def __init__(
        self,
        store: CasStore,
        stored: StoredManifest,
        levels: VersionSet,
        memtable: Memtable,
        applier: LogApplier,
        settings: ReaderSettings,
    ) -> None:
        """Prepare; what is found is given to `applying`, which applies it to `memtable`."""
        self._store = store
        self._clock = store.runtime.clock
        self._stored = stored
        self._levels = levels
        self._memtable = memtable
        self._applier = applier
        self._settings = settings
        self._store_time = StoreTime(store, settings.manifest_interval_ms)
        self.tailing: TailReader | None = None  # set by the engine if it can reach safekeepers
        self._pacing = IdlePoll(
            settings.poll_interval_ms, settings.poll_interval_idle_ms, unchanged_max=EMPTY_POLLS
        )
        self._polls = SingleFlight()
        self._last_poll_ms = -math.inf
        self._corrupt_polls = 0
        self._gap_since_ms: float | None = None
        self._gap_wal_id = 0  # the slot that is waited for
        # By the monotonic clock, which is never set back.
        self._fresh_at_ms = self._clock.monotonic_ms() - NEVER_MS
        self.counts = FollowerCounts()
        self.is_full = False
        self.is_cut_off = False

    @property
    def next_wal_id(self) -> int:
        """The slot that comes next."""
        return self._applier.position.next_wal_id

    @property
    def interval_ms(self) -> float:
        """The present interval between polls."""
        return self._pacing.wait_ms

    @property
    def is_in_gap(self) -> bool:
        """Whether the next object is missing although later ones exist."""
        return self._gap_since_ms is not None

    @property
    def gap_ms(self) -> float:
        """Total time of waiting for gaps, including the present one."""
        since_ms = self._gap_since_ms
        now_ms = 0 if since_ms is None else self._clock.monotonic_ms() - since_ms
        return self.counts.gap_ms + now_ms

    @property
    def may_leave_gaps(self) -> bool:
        """Whether the writer may have several objects in flight, or is not known yet."""
        manifest = self._stored.current
        if not manifest.is_log_in_store:
            return False  # objects are archived in their order
        width = max(manifest.max_parallel_writes, manifest.fence_width)
        return width > 1 or self._applier.epoch > manifest.writer_epoch

    @property
    def is_pushed(self) -> bool:
        """Whether a live tail delivers commits, so that polling finds nothing sooner."""
        return self.tailing is not None and self.tailing.is_live

    @property
    def staleness_ms(self) -> int:
        """Every write acknowledged at least so many milliseconds ago is applied."""
        return math.ceil(self._clock.monotonic_ms() - self._fresh_at_ms)

    def mark_fresh(self, at_ms: float) -> None:
        """Record that everything acknowledged before the monotonic time `at_ms` is applied."""
        self._fresh_at_ms = max(self._fresh_at_ms, at_ms)

    @property
    def _is_behind_levels(self) -> bool:
        """Whether the levels hold slots that were not applied and are not found in the log.

        The log then continues behind ids that a switch to safekeepers left out.
        """
        return self._stored.current.first_uncompacted_wal_id > self.next_wal_id

    async def note_end(self, asked_ms: float) -> None:
        """Record that all objects are applied that were in the store at the monotonic time
        `asked_ms`.

        Where safekeepers have later records, the last object determines the freshness: everything
        is applied that was acknowledged before its last commit, by the clock of the store.
        """
        if self._applier.epoch > self._stored.current.writer_epoch:
            await self._stored.refresh()  # a new writer may have switched the WAL mode
        if self._is_behind_levels:
            return
        if self._stored.current.is_log_in_store:
            self.mark_fresh(asked_ms)
            return
        if self._applier.written_ms:
            at_ms = await self._store_time.lapsed_ms(self._applier.written_ms)
            self.mark_fresh(min(asked_ms, at_ms))

    async def poll_now(self) -> None:
        """Poll now; return when a poll that began after this call has ended."""
        await self._polls.next()

    def hurry(self) -> None:
        """Poll now, and frequently for a while: a call waits for later commits."""
        self._pacing.reset()
        self._polls.asked.set()

    async def run(self) -> None:
        """Follow until cancelled.

        Raises `CorruptObject` when the next object is damaged in repeated reads, `IllegalState`,
        and as the manifest.
        """
        try:
            while True:
                await self._wait_until_due()
                is_wanted = self._polls.is_wanted
                self._polls.begin()
                await self._poll_once(is_wanted=is_wanted)
                self._polls.answer()
        finally:
            self._polls.end()

    async def _wait_until_due(self) -> None:
        self._polls.asked.clear()
        least_ms = self._left_ms(self._settings.poll_interval_min_ms)
        if least_ms:
            await self._clock.sleep_ms(least_ms)
        if not self._polls.is_wanted:
            try:
                async with asyncio.timeout(self._left_ms(self._pacing.wait_ms) / 1_000):
                    await self._polls.asked.wait()
            except TimeoutError:
                pass
        self._last_poll_ms = self._clock.monotonic_ms()

    def _left_ms(self, interval_ms: float) -> float:
        """Time left until `interval_ms` have passed since the last poll began."""
        return max(self._last_poll_ms + interval_ms - self._clock.monotonic_ms(), 0)

    async def _poll_once(self, *, is_wanted: bool) -> None:
        try:
            if self.tailing is not None and self.tailing.is_live:
                await self.tailing.confirm(is_wanted=is_wanted)
            else:
                await self._apply_all()
        except CorruptObject as error:
            self._corrupt_polls += 1
            log.warning("a WAL object is damaged", problem=str(error), polls=self._corrupt_polls)
            if self._corrupt_polls >= CORRUPT_POLLS:
                raise
        except StoreError as error:
            if not self.is_cut_off:
                log.warning("the object store does not answer", problem=str(error))
            self.is_cut_off = True
        else:
            if self.is_cut_off:
                log.info("the object store answers again")
            self.is_cut_off = False
            self._corrupt_polls = 0
        self._pacing.observe(self._applier.seq)
        self._end_gap()

    async def _apply_all(self) -> None:
        """Apply all objects that exist, until the end of the log, or until memory is full."""
        count = 1
        while True:
            if self.is_memory_full():
                await self._free_memory()
                return
            asked_ms = self._clock.monotonic_ms()
            first = self.next_wal_id
            found, is_end = await self._read(first, count)
            if not await self._is_answer_valid(first):
                continue
            for each in found:
                if each.index.blocks_of(Section.CONTROL):
                    await self.protect_load()
                self._applier.apply_object(each)
                await self._store.runtime.clock.sleep_ms(0)
            await self._memtable.merge_runs(self._clock)
            self.counts.applied += len(found)
            if is_end and self.next_wal_id == first + len(found):
                self.counts.empty_looks += not found
                if not await self._is_gap():
                    await self.note_end(asked_ms)
                if not self._is_behind_levels:
                    return
                await self._levels.follow_manifest(is_forced=True)
            count = min(2 * count, self._settings.reader_parallel_reads) if found else 1

    def is_memory_full(self) -> bool:
        """Whether memory is full: nothing more is applied before some of it is compacted."""
        used_bytes = self._applier.memory_bytes
        is_full = used_bytes >= self._settings.reader_memtable_bytes_max
        if is_full and not self.is_full:
            log.warning("memory is full: waiting for the compactor", used_bytes=used_bytes)
        self.is_full = is_full
        return is_full

    async def _free_memory(self) -> None:
        """Drop from memory what is compacted by now.

        The next objects may be compacted as well, and might never fit into memory. Then the log
        continues behind the levels that have them.
        """
        manifest = await self._stored.refresh()
        if manifest.first_uncompacted_wal_id > self.next_wal_id:
            await self._levels.follow_manifest(is_forced=True)
        else:
            await self._levels.follow_manifest()

    async def _read(self, first: int, count: int) -> tuple[Sequence[Sst], bool]:
        """Read the objects from slot `first` on. Also returns whether one of the `count` was
        missing.

        An error is raised only when its object comes next: the objects before it are applied first.
        """
        database_id = self._stored.current.database_id
        async with asyncio.TaskGroup() as tasks:
            reading = [
                tasks.create_task(read_slot(self._store, wal_id, database_id))
                for wal_id in range(first, first + count)
            ]
        found: list[Sst] = []
        for task in reading:
            each = task.result()
            if isinstance(each, ObjectNotFound):
                return found, True
            if not isinstance(each, ShaleError):
                found.append(each)
            elif found:
                return found, False
            else:
                raise each
        return found, False

    async def _is_answer_valid(self, first: int) -> bool:
        """Whether what was read from slot `first` on, or its absence, belongs to the log."""
        levels = self._levels
        if levels.is_surely_protected:
            return True
        manifest = await self._stored.refresh()
        if self._settings.snapshot is SnapshotChoice.OWN:
            if not levels.is_lost:
                return True
            log.warning("the snapshot of this reader was lost: another is made")
            await levels.follow_manifest()
            return False
        if manifest.first_uncompacted_wal_id <= first:
            return True
        await levels.follow_manifest(is_forced=True)
        return False

    async def protect_load(self) -> None:
        """Protect the files of a load, which the next object commits, before they are read.

        A manifest that is read now names them, either as a pending load or in levels that contain
        the object. In the latter case these levels are read from now on, and the object is not
        needed any more.
        """
        await self._stored.refresh()
        await self._levels.follow_manifest(is_forced=True)

    async def _is_gap(self) -> bool:
        """Whether anything may be acknowledged behind the next slot, which is empty."""
        self._end_gap()
        if not self.may_leave_gaps:
            return False
        folder = await list_wal(self._store, self.next_wal_id)
        if not folder.filled:
            return False
        if self.next_wal_id not in folder.filled and self._gap_since_ms is None:
            self._gap_since_ms = self._clock.monotonic_ms()
            self._gap_wal_id = self.next_wal_id
            self._pacing.reset()  # the missing object is about to arrive
            self.counts.gaps += 1
            log.info("waiting for a gap", wal_id=self.next_wal_id, behind=max(folder.filled))
        return True

    def _end_gap(self) -> None:
        """Record the end of a gap, if the slot that was waited for is applied."""
        if self._gap_since_ms is not None and self.next_wal_id > self._gap_wal_id:
            self.counts.gap_ms += self._clock.monotonic_ms() - self._gap_since_ms
            self._gap_since_ms = None


class TailedReplica:
    """A replica that also follows the store: implements `replica.tail.Tailed`."""

    def __init__(
        self,
        applier: LogApplier,
        follower: Follower,
        *,
        database_id: bytes,
        poll_archive: Callable[[], None],
    ) -> None:
        """`poll_archive` requests that the archive is polled soon."""
        self._applier = applier
        self._follower = follower
        self._database_id = database_id
        self._poll_archive = poll_archive

    @property
    def position(self) -> AppliedPosition:
        return self._applier.position

    async def apply(self, record: Record) -> None:
        """Apply a record, unless it was applied meanwhile as a part of its object."""
        found = None
        if record.payload:
            name = names.wal_name(record.wal_id)
            found = open_sst(name, record.payload, database_id=self._database_id)
            if found.index.blocks_of(Section.CONTROL):
                await self._follower.protect_load()
        if self._applier.position.judge(record) is News.NEXT:
            self._applier.apply_record(record, found)
        if self._applier.unarchived.is_half_full:
            self._poll_archive()

    def is_memory_full(self) -> bool:
        return self._follower.is_memory_full()

    async def read_archive(self) -> None:
        """Poll the store, which has what comes next."""
        await self._follower.poll_now()

    def mark_fresh(self, at_ms: float) -> None:
        self._follower.mark_fresh(at_ms)
