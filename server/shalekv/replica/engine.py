"""The engine of a replica: the state that it has applied, and the tasks that keep it up to date.

It is stateless: all that it knows came from the object store or from safekeepers, and is gone when
the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shalekv.errors import (
    NotTheWriter,
    ObjectNotFound,
    ShaleError,
    SnapshotNotFound,
    Stopping,
    raise_if,
)
from shalekv.format.sst import Sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Version
from shalekv.read.engine import ShedViews, shed_nothing
from shalekv.read.memtable import Memtable
from shalekv.read.read_pins import ReadPins
from shalekv.read.replay import Replayed
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.read.version_set import RELEASE_TIMEOUT_MS, VersionSet
from shalekv.read.watermark import Watermark
from shalekv.replica.apply import ArchiveCursor, LogApplier
from shalekv.replica.follow import Follower, ManifestFollower
from shalekv.replica.join import JoinedReplica
from shalekv.replica.progress import PollSchedule, Staleness
from shalekv.replica.tail import RecordApplier, TailReader
from shalekv.settings import LimitSettings, ReaderSettings
from shalekv.store.cas import CasStore
from shalekv.watch.feed import CommitFeed
from shalekv.write.quorum.links import Links

log = structlog.get_logger()

HELD_PARTS = 4  # scans may keep a quarter of memory after compaction, then they are ended


class _End:
    """The end of an engine, by `close` or by an error."""

    def __init__(self) -> None:
        self.error: ShaleError | None = None
        self._has_ended = asyncio.Event()

    def set(self, error: ShaleError | None = None) -> None:
        """End; the first error is kept."""
        self.error = self.error or error
        self._has_ended.set()

    async def wait(self) -> ShaleError | None:
        """Wait for the end. Return the error, if there is one by then."""
        await self._has_ended.wait()
        return self.error


class ReplicaEngine:
    """The state of a database as one replica sees it: implements `ReadEngine`."""

    def __init__(
        self,
        store: CasStore,
        joined: JoinedReplica,
        settings: ReaderSettings,
        limits: LimitSettings,
        links: Links | None = None,
        *,
        shed_views: ShedViews = shed_nothing,
    ) -> None:
        """Begin with the levels; nothing of the log after them is applied yet.

        `links` reach the safekeepers that may hold the end of the log. Without them the replica
        sees only what is in the store. `shed_views` is called when the views of reads keep too much
        in memory.
        """
        self._clock = store.runtime.clock
        self._shed_views = shed_views
        self._end = _End()
        self.manifest = joined.manifest
        polls, version = PollSchedule(self._clock, settings), joined.version
        self.memtable = Memtable()
        self.watermark = Watermark(seq=version.last_seq, wal_id=version.wal_id, on_wait=polls.hurry)
        self.applier = self._applier(joined, settings)
        self.levels = self._version_set(store, joined)
        self.snapshots = SnapshotViews(store, joined.manifest, joined.ssts, limits)
        self._archive = ArchiveCursor(
            store, joined.manifest, self.applier, interval_ms=settings.poll_interval_ms
        )
        self._manifest_follower = ManifestFollower(
            joined.manifest, self.levels, self._archive, settings, self._clock
        )
        self.follower = self._log_follower(store, settings, links, polls)

    def _applier(self, joined: JoinedReplica, settings: ReaderSettings) -> LogApplier:
        replayed = Replayed(
            self.memtable,
            joined.version.last_seq,
            joined.logical_time_ms,
            time_reset_wal_id=joined.manifest.current.time_reset_wal_id,
            land_load=lambda load: self.levels.land_load(load, None),
        )
        return LogApplier(
            replayed,
            self.watermark,
            epoch=joined.epoch,
            written_ms=joined.written_ms,
            archived_wal_id=joined.version.wal_id,
            memory_bytes_max=settings.reader_memtable_bytes_max,
            view=self._view,
            # The manifest has the address of the new writer.
            on_new_writer=self._poll_manifest_soon,
        )

    def _version_set(self, store: CasStore, joined: JoinedReplica) -> VersionSet:
        pins = ReadPins(
            store,
            joined.manifest,
            joined.snapshot_id,
            ttl_s=joined.snapshot_ttl_s,
            since_ms=joined.protected_since_ms,
            archived=lambda: self.applier.archived_wal_id,
        )
        return VersionSet(
            store,
            pins,
            PinnedVersion(joined.version, joined.ssts, joined.snapshot_id),
            loads=(),
            memtable=self.memtable,
            watermark=self.watermark,
            drop_through=self._drop_through,
            jump=self._jump,
        )

    def _log_follower(
        self, store: CasStore, settings: ReaderSettings, links: Links | None, polls: PollSchedule
    ) -> Follower:
        staleness = Staleness(store, settings)
        tail = None
        if links is not None:
            records = RecordApplier(
                self.applier,
                self.levels,
                self.manifest,
                poll_archive=self._poll_manifest_soon,
            )
            tail = TailReader(
                links,
                self.manifest,
                settings,
                records,
                clock=self._clock,
                polls=polls,
                staleness=staleness,
            )
        return Follower(
            store,
            self.manifest,
            self.levels,
            self.applier,
            settings,
            polls=polls,
            staleness=staleness,
            tail=tail,
        )

    @property
    def database_id(self) -> bytes:
        """The id of the database, 16 bytes."""
        return self.manifest.current.database_id

    @property
    def pinned(self) -> PinnedVersion:
        """The levels that a new read uses."""
        return self.levels.current

    def now_ms(self) -> int:
        """Return the logical time of the newest applied commit."""
        return self.applier.now_ms()

    @property
    def held_bytes_max(self) -> int:
        """Maximum memory of entries that are compacted, but kept for scans that began before."""
        return self.applier.memory.bytes_max // HELD_PARTS

    @property
    def memory_bytes(self) -> int:
        """Accounted memory of what is not compacted, not archived, or kept for scans."""
        return self.applier.memory_bytes

    @property
    def epoch(self) -> int:
        """The epoch of the writer whose commits were applied last."""
        return self.applier.epoch

    @property
    def feed(self) -> CommitFeed:
        """The feed of watches."""
        return self.applier.feed

    @property
    def is_pushed(self) -> bool:
        """Return whether a live tail delivers commits, so that polling finds nothing sooner."""
        return self.follower.is_pushed

    @property
    def newest_seq(self) -> int:
        """Raise `NotTheWriter`."""
        raise self.refusal("a read at UNCOMMITTED")

    @property
    def staleness_ms(self) -> int:
        """The staleness in ms: every write acknowledged at least so long ago is applied."""
        return self.follower.staleness.age_ms

    @property
    def writer_address(self) -> str:
        """HOST:PORT of the writer by the manifest that was read last; may be empty."""
        return self.manifest.current.writer_address

    def refusal(self, what: str) -> NotTheWriter:
        """Return the refusal of `what`, and poll the manifest: the writer may have changed."""
        self._poll_manifest_soon()
        return NotTheWriter(what, writer_address=self.writer_address)

    def check_serving(self) -> None:
        """Raise the error that ended this engine. Reads are still answered after `close`."""
        raise_if(self._end.error)

    def committed(self, key: bytes) -> Entry | None:
        """Return the newest version of `key` in memory; None: the levels decide."""
        return self.memtable.get(key)

    def newest(self, key: bytes) -> Entry | None:
        """Raise `NotTheWriter`."""
        del key
        raise self.refusal("a read at UNCOMMITTED")

    async def committed_view(self) -> ReadView:
        """Return the state that was applied, with its levels."""
        return self._view()

    async def newest_view(self) -> ReadView:
        """Raise `NotTheWriter`."""
        raise self.refusal("a read at UNCOMMITTED")

    async def confirm(self) -> None:
        """Raise `NotTheWriter`: only the writer can confirm that it has not been replaced."""
        raise self.refusal("a read at LINEARIZABLE")

    async def catch_up(self) -> None:
        """Poll the log now, and return when that has ended, successfully or not."""
        self.check_serving()
        await self.follower.polls.next()

    async def explain(self, missing: ObjectNotFound, pinned: PinnedVersion) -> ShaleError:
        """Return the error for an object of a version that is read and is missing.

        `SnapshotNotFound` if the version is not protected any more: later reads use another one.
        Otherwise `missing` itself: a protected object was deleted.
        """
        try:
            await self.manifest.refresh()
            is_protected = bool(pinned.snapshot_id) and self.levels.pins.protects(pinned)
            if not is_protected:
                await self.levels.replace_lost(pinned)
        except ShaleError as error:
            return error
        if is_protected:
            return missing
        return SnapshotNotFound(
            f"{missing.name} is gone: the levels of manifest {pinned.version.manifest_id} are not "
            "protected any more, since this reader was stopped for long, or reads without a "
            "snapshot. Read again, from the beginning"
        )

    async def unarchived_object(self, wal_id: int) -> Sst | None:
        """Read the applied part of an object that may not be in the store; None: it is there."""
        return await self._archive.unarchived_object(wal_id)

    async def archive(self) -> None:
        """Wait until everything published now is in the store. Raises `QuorumUnavailable`."""
        await self._archive.wait_archived()

    async def load(self, last_wal_id: int | None, *, asked_ms: float) -> None:
        """Apply the log as it was when this replica joined, and keep it protected meanwhile.

        Applies no more than memory holds: `run` goes on when the compactor has caught up.
        `asked_ms` is a monotonic time before the log was listed.

        Raises `ObjectNotFound` when an object was lost nevertheless: join again.
        """
        failure: ShaleError | None = None
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(
                self._end_by_error(self._manifest_follower.run), name="follow the manifest"
            )
            try:
                await self.follower.load(last_wal_id, asked_ms=asked_ms)
            except ShaleError as error:  # raised below, because the task group would wrap it
                failure = error
            finally:
                keeping.cancel()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End `run`; reads are answered until the server ends."""
        self._end.set()

    async def ended(self) -> ShaleError | None:
        """Wait until the engine has ended. Returns the error that ended it; None after `close`."""
        return await self._end.wait()

    async def run(self) -> None:
        """Follow the writer until `close`, or raise the error that ended it."""
        failure: ShaleError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                followers = [self.follower.run, self._manifest_follower.run]
                if self.follower.tail is not None:
                    followers.append(self.follower.tail.run)
                others = [
                    *(tasks.create_task(self._end_by_error(run)) for run in followers),
                    tasks.create_task(self.levels.pruner.run(), name="drop what is compacted"),
                    tasks.create_task(self.memtable.merge_when_due(self._clock), name="merge runs"),
                    tasks.create_task(self.levels.ssts.write_disk_cache(), name="keep on disk"),
                ]
                await self._end.wait()
                for task in others:
                    task.cancel()
        finally:
            failure = self._end.error
            self.watermark.fail(failure or Stopping("this reader is shutting down"))
        if failure is not None:
            raise failure

    async def release(self, timeout_ms: float = RELEASE_TIMEOUT_MS) -> None:
        """Remove the snapshots of this process, as `VersionSet.close`.

        REQUIRES: no reads are in progress.
        """
        await self.levels.close(timeout_ms)

    async def _end_by_error(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run a task of the engine, whose error ends it."""
        try:
            await run()
        except ShaleError as error:
            self._end.set(error)

    def _poll_manifest_soon(self) -> None:
        self._manifest_follower.poll_soon()

    def _view(self) -> ReadView:
        pinned = self.levels.current
        view = self.memtable.view(self.watermark.seq, self.watermark.wal_id)
        return view if pinned.version.is_empty else view.with_levels(pinned)

    def _jump(self, version: Version) -> None:
        """Continue the log after a version that is newer than the applied state.

        The objects that the version holds are not applied: they may be deleted.
        """
        if version.wal_id is None:
            return
        log.warning(
            "skipped objects of the log that the levels hold",
            wal_id=version.wal_id,
            applied=self.watermark.wal_id,
        )
        manifest = self.manifest.current  # which is not older than that of the version
        self.applier.jump(
            version, epoch=manifest.writer_epoch, logical_time_ms=manifest.logical_time_ms
        )

    async def _drop_through(self, seq: int) -> None:
        """Drop from memory what the levels hold up to sequence number `seq`."""
        await self.memtable.drop_through(seq, self._clock)
        self.levels.release_dropped()
        if self._is_too_much_held():
            await self._shed_views(self._is_too_much_held)

    def _is_too_much_held(self) -> bool:
        return self.memtable.held_bytes > self.held_bytes_max
