"""Following the writer: a replica polls for the next WAL object, and applies it.

    GET wal/<next> --- there --> apply, and ask for those after it, more of them at once
         |  ^
     not there |  wait: `poll_interval_ms`, longer while nothing happens, less when a read asks
         +--+

See server/docs/protocol.md, "Readers". In a database with safekeepers, the newest commits come from
them (`replica.tail`). While that works the bucket is not polled, and each poll asks the safekeepers
how recent the applied state is.

A missing object has one of three meanings:

- It is the end of the log. Everything that was acknowledged before the request is applied.
- It is a gap: later objects exist, since the writer may create several at once. The replica waits
  for the object, and its staleness grows meanwhile. It waits without limit for an object that was
  lost, and serves reads of the older state; `fsck` reports the loss. Where the writer creates one
  object at a time, there are no gaps, and the replica does not search for later objects. Nor does
  it in the archive of safekeepers, which may have gaps: see `note_end`.
- It was compacted and then collected. This is possible only if the snapshot of this replica has
  expired, or if it has none. The replica then goes on with the levels of a newer manifest, and with
  the log after them.

So an answer of the store about a slot counts only if the snapshot of this replica cannot have
expired by its own clock, or is still in a manifest that was listed after the answer. Without a
snapshot, such a manifest must show that nothing from the slot on is compacted.

`ManifestFollower` polls the manifest meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from shalekv.clock import Clock
from shalekv.errors import CorruptObject, ObjectNotFound, ShaleError, StoreError
from shalekv.format.columns import Section
from shalekv.format.sst import Sst
from shalekv.protocol.tail import is_new_writer
from shalekv.read.replay import apply_in_order, read_slot
from shalekv.read.version_set import VersionSet
from shalekv.replica.apply import ArchiveCursor, LogApplier, protect_load
from shalekv.replica.progress import GapTimer, PollSchedule, Staleness
from shalekv.replica.tail import TailReader
from shalekv.settings import ReaderSettings, SnapshotChoice
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.wal import list_wal

log = structlog.get_logger()

PARALLEL_READS_MAX = 16  # WAL objects fetched at once: they hide the latency of the store
CORRUPT_POLLS = 3  # reads of a damaged object: it may be intact in the store
MANIFEST_SPACING_MS = 250  # least time between two polls of the manifest, on demand or not


@dataclass(slots=True)
class FollowerCounts:
    """Counters of a follower."""

    applied: int = 0  # WAL objects
    empty_polls: int = 0


class Follower:
    """Applies what the writer makes durable, in slot order (I4, I6)."""

    def __init__(
        self,
        store: CasStore,
        stored: StoredManifest,
        levels: VersionSet,
        applier: LogApplier,
        settings: ReaderSettings,
        *,
        polls: PollSchedule,
        staleness: Staleness,
        tail: TailReader | None,
    ) -> None:
        """Prepare; objects that are found are given to `applier`.

        While `tail` delivers commits, the object store is not polled. None: this replica reads the
        object store only.
        """
        self._store = store
        self._stored = stored
        self._levels = levels
        self._applier = applier
        self._settings = settings
        self.polls = polls
        self.staleness = staleness
        self.tail = tail
        self.gaps = GapTimer(store.runtime.clock)
        self.counts = FollowerCounts()
        self.is_cut_off = False  # the object store did not answer the last poll

    @property
    def next_wal_id(self) -> int:
        """The slot to apply next."""
        return self._applier.position.next_wal_id

    @property
    def may_leave_gaps(self) -> bool:
        """Return whether gaps of the log in the store must be told from its end.

        They must if the writer may create several objects at once, or is not known yet. With
        safekeepers `note_end` relies on the last applied commit alone.
        """
        manifest = self._stored.current
        if not manifest.is_log_in_store:
            return False
        width = max(manifest.max_parallel_writes, manifest.fence_width)
        return width > 1 or is_new_writer(self._applier.epoch, manifest.writer_epoch)

    @property
    def is_pushed(self) -> bool:
        """Return whether a live tail delivers commits, so that polling finds nothing sooner."""
        return self.tail is not None and self.tail.is_live

    @property
    def _is_behind_levels(self) -> bool:
        """Return whether the levels hold slots that were not applied.

        At the end of the log this means that the next ids have no objects: a switch to safekeepers
        left them out, and the log continues after the levels.
        """
        return self._stored.current.first_uncompacted_wal_id > self.next_wal_id

    async def note_end(self, asked_ms: float) -> None:
        """Update the staleness after a poll that has found the end of the log in the store.

        REQUIRES: the log is in safekeepers, or all objects that were in the store at `asked_ms`, a
        monotonic time, are applied. Safekeepers may have later records. Then only what was
        acknowledged before the last applied commit is known to be applied, and the logical time of
        that commit determines the staleness.
        """
        if is_new_writer(self._applier.epoch, self._stored.current.writer_epoch):
            await self._stored.refresh()  # a new writer may have switched the WAL mode
        if self._is_behind_levels:
            return
        if self._stored.current.is_log_in_store:
            self.staleness.mark_fresh(asked_ms)
        elif self._applier.written_ms:
            await self.staleness.mark_written(self._applier.written_ms, asked_ms=asked_ms)

    async def load(self, last_wal_id: int | None, *, asked_ms: float) -> None:
        """Apply the objects up to `last_wal_id` (None: none), or until memory is full.

        `asked_ms` is a monotonic time before the log was listed. Raises `ObjectNotFound` when an
        object was collected.
        """
        first = self.next_wal_id
        await apply_in_order(
            self._store,
            range(first, first if last_wal_id is None else last_wal_id + 1),
            database_id=self._stored.current.database_id,
            memtable=self._applier.memtable,
            apply=self._applier.apply_object,
            parallel_reads=PARALLEL_READS_MAX,
            is_full=self._applier.is_memory_full,
        )
        if not self.may_leave_gaps and not self._applier.memory.is_full:
            await self.note_end(asked_ms)

    async def run(self) -> None:
        """Follow until cancelled.

        Raises `CorruptObject` when the next object is damaged in repeated reads, `IllegalState`
        when the log was replaced by another one, and what an edit of the manifest raises.
        """
        corrupt_polls = 0
        try:
            while True:
                is_wanted = await self.polls.begin()
                try:
                    await self._poll(is_wanted=is_wanted)
                except CorruptObject as error:
                    corrupt_polls += 1
                    log.warning("a WAL object is damaged", problem=str(error), polls=corrupt_polls)
                    if corrupt_polls >= CORRUPT_POLLS:
                        raise
                else:
                    corrupt_polls = corrupt_polls if self.is_cut_off else 0
                self.gaps.end_before(self.next_wal_id)
                self.polls.end(self._applier.seq)
        finally:
            self.polls.close()

    async def _poll(self, *, is_wanted: bool) -> None:
        """Poll the safekeepers if a tail delivers commits, otherwise the store.

        `is_wanted`: a call waits for the end of this poll.
        """
        try:
            if self.tail is not None and self.tail.is_live:
                await self.tail.confirm(is_wanted=is_wanted)
            else:
                await self._apply_all()
        except StoreError as error:
            if not self.is_cut_off:
                log.warning("the object store does not answer", problem=str(error))
            self.is_cut_off = True
            return
        if self.is_cut_off:
            log.info("the object store answers again")
        self.is_cut_off = False

    async def _apply_all(self) -> None:
        """Apply all objects that exist, until the end of the log, or until memory is full."""
        count = 1
        while True:
            if self._applier.is_memory_full():
                await self._free_memory()
                return
            asked_ms = self._store.runtime.clock.monotonic_ms()
            first = self.next_wal_id
            found, is_end = await self._read(first, count)
            if not await self._is_answer_valid(first):
                continue
            for each in found:
                if each.index.blocks_of(Section.CONTROL):
                    await protect_load(self._stored, self._levels)
                self._applier.apply_object(each)
                await self._store.runtime.clock.sleep_ms(0)
            await self._applier.memtable.merge_runs(self._store.runtime.clock)
            self.counts.applied += len(found)
            if is_end and self.next_wal_id == first + len(found):
                self.counts.empty_polls += not found
                if not await self._is_gap():
                    await self.note_end(asked_ms)
                if not self._is_behind_levels:
                    return
                await self._levels.follow_manifest(is_forced=True)
            count = min(2 * count, PARALLEL_READS_MAX) if found else 1

    async def _free_memory(self) -> None:
        """Drop from memory what is compacted by now.

        If the next objects are compacted as well, they are not applied, since they might never fit
        into memory: the log continues after the levels that hold them.
        """
        manifest = await self._stored.refresh()
        if manifest.first_uncompacted_wal_id > self.next_wal_id:
            await self._levels.follow_manifest(is_forced=True)
        else:
            await self._levels.follow_manifest()

    async def _read(self, first: int, count: int) -> tuple[Sequence[Sst], bool]:
        """Read `count` objects from slot `first` on, up to the first that is missing.

        Also return whether one was missing. An error is raised only when its object comes next: the
        objects before it are applied first.
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
        """Return whether what was read from slot `first` on was not collected meanwhile.

        If it may have been, go on with the levels of a newer manifest; the caller reads again.
        """
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

    async def _is_gap(self) -> bool:
        """Return whether the next slot, which is empty, is a gap: later slots are filled.

        Commits in these may be acknowledged, although they are not applied here.
        """
        self.gaps.end_before(self.next_wal_id)
        if not self.may_leave_gaps:
            return False
        folder = await list_wal(self._store, self.next_wal_id)
        if not folder.filled:
            return False
        if self.next_wal_id not in folder.filled and not self.gaps.is_open:
            self.gaps.begin(self.next_wal_id)
            self.polls.speed_up()  # the missing object is about to arrive
            log.info("waiting for a gap", wal_id=self.next_wal_id, behind=max(folder.filled))
        return True


class ManifestFollower:
    """Polls the manifest at an interval, and soon when asked to; renews the snapshots in time."""

    def __init__(
        self,
        stored: StoredManifest,
        levels: VersionSet,
        archive: ArchiveCursor,
        settings: ReaderSettings,
        clock: Clock,
    ) -> None:
        """Prepare; `run` polls."""
        self._stored = stored
        self._levels = levels
        self._archive = archive
        self._settings = settings
        self._clock = clock
        self._asked = asyncio.Event()

    def poll_soon(self) -> None:
        """Poll as soon as the spacing of polls allows it."""
        self._asked.set()

    async def run(self) -> None:
        """Follow the manifest until cancelled. Raises `ShaleError`, but no `StoreError`."""
        ttl_ms = 1_000 * self._settings.reader_snapshot_ttl_s
        interval_ms = min(self._settings.manifest_interval_ms, ttl_ms / 6)
        # The spacing holds however many writes are refused, each of which polls the manifest.
        least_ms = min(MANIFEST_SPACING_MS, self._settings.poll_interval_ms, interval_ms)
        while True:
            await self._clock.sleep_ms(least_ms)
            try:
                async with asyncio.timeout((interval_ms - least_ms) / 1_000):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            try:
                await self._stored.refresh()
                await self._archive.poll()
                await self._levels.follow_manifest()
            except StoreError as error:
                log.warning("the manifest could not be followed", error=str(error))
