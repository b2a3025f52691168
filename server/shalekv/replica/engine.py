"""The engine of a replica: what it has applied, and the tasks that keep it up to date.

It is stateless: whatever it knows came from the object store, and goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shalekv.clock import Clock
from shalekv.errors import (
    NotTheWriter,
    ObjectNotFound,
    ShaleError,
    SnapshotNotFound,
    Stopping,
    StoreError,
)
from shalekv.format.sst import Sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Version
from shalekv.read.replay import Replayed, apply_in_order
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.read.version_set import LEAVE_TIMEOUT_MS, VersionSet
from shalekv.replica.apply import ArchiveCursor, LogApplier
from shalekv.replica.follow import Follower, TailedReplica
from shalekv.replica.join import JoinedReplica
from shalekv.replica.tail import Tailing
from shalekv.settings import LimitSettings, ReaderSettings
from shalekv.store.cas import CasStore
from shalekv.watch.feed import CommitFeed
from shalekv.write.quorum.links import Links

log = structlog.get_logger()

MANIFEST_APART_MS = 250  # at least, between two looks at the manifest, whoever asks for them
UNARCHIVED_PARTS = 16  # of memory, at most, for records whose objects may not be in the store
HELD_PARTS = 4  # scans may keep a quarter of the memory that is compacted, or they are ended


async def _keep_all() -> None:
    """There are no views."""


class ReplicaTime:
    """Logical time as the log tells it: never ahead of the writer's."""

    def __init__(self, replayed: Replayed) -> None:
        """That of what was applied last."""
        self._replayed = replayed

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; never less than before."""
        return self._replayed.logical_time_ms


class ReaderEngine:
    """The state of a database as one replica sees it: a `ReadEngine`."""

    def __init__(
        self,
        store: CasStore,
        joined: JoinedReplica,
        settings: ReaderSettings,
        limits: LimitSettings,
        links: Links | None = None,
    ) -> None:
        """Nothing after the levels is applied yet.

        `links` reach the safekeepers that may hold the end of the log; without them what is in the
        store is all that is seen.
        """
        self._store = store
        self._clock: Clock = store.runtime.clock
        self._settings = settings
        self.manifest = joined.manifest
        self.memtable = joined.memtable
        self.prefix = joined.progress
        self._ended: ShaleError | None = None
        self._closed = asyncio.Event()
        self._manifest_asked = asyncio.Event()
        self.shed_views: Callable[[], Awaitable[None]] = _keep_all  # to be set by who keeps views
        self._replayed = Replayed(
            self.memtable,
            joined.tree.last_seq,
            joined.logical_time_ms,
            time_reset_wal_id=joined.manifest.current.time_reset_wal_id,
            land_load=lambda load: self.levels.land_load(load, None),
        )
        self.time = ReplicaTime(self._replayed)
        self.applying = LogApplier(
            self._replayed,
            self.prefix,
            epoch=joined.epoch,
            written_ms=joined.written_ms,
            archived_wal_id=joined.progress.wal_id,
            unarchived_bytes_max=settings.reader_memtable_bytes_max // UNARCHIVED_PARTS,
            view=self._view,
            on_new_writer=self._manifest_asked.set,  # which tells where it is
        )
        self._archive = ArchiveCursor(
            store, joined.manifest, self.applying, interval_ms=settings.poll_interval_ms
        )
        self.levels = self._tree_keeper(joined)
        self.snapshots = SnapshotViews(store, joined.manifest, joined.ssts, limits)
        self.follower = Follower(
            store, joined.manifest, self.levels, self.memtable, self.applying, settings
        )
        if links is not None:
            self.follower.tailing = self._tailing(links)
        self.prefix.on_wait = self.follower.hurry

    def _tree_keeper(self, joined: JoinedReplica) -> VersionSet:
        return VersionSet(
            self._store,
            joined.manifest,
            PinnedVersion(joined.tree, joined.ssts, joined.snapshot_id),
            loads=(),
            memtable=self.memtable,
            prefix=self.prefix,
            snapshot_ttl_s=joined.snapshot_ttl_s,
            on_compacted=self._drop_through,
            jump=self._jump,
            archived=lambda: self.applying.archived_wal_id,
            protected_since_ms=joined.protected_since_ms,
        )

    def _tailing(self, links: Links) -> Tailing:
        replica = TailedReplica(
            self.applying,
            self.follower,
            database_id=self.manifest.current.database_id,
            see_archive=self._manifest_asked.set,
        )
        return Tailing(links, self.manifest, self._clock, self._settings, replica)

    @property
    def database_id(self) -> bytes:
        """16 bytes."""
        return self.manifest.current.database_id

    @property
    def held(self) -> PinnedVersion:
        """The levels that a read uses that begins now."""
        return self.levels.current

    @property
    def held_bytes_max(self) -> int:
        """So much may be compacted, and kept in memory by scans that began before."""
        return self._settings.reader_memtable_bytes_max // HELD_PARTS

    @property
    def memory_bytes(self) -> int:
        """What is not compacted, as accounted, and what is kept by scans that began before."""
        return self.applying.memory_bytes

    @property
    def epoch(self) -> int:
        """Of the writer whose commits were applied last."""
        return self.applying.epoch

    @property
    def feed(self) -> CommitFeed:
        """Who watches."""
        return self.applying.feed

    @property
    def is_told(self) -> bool:
        """Whether what is committed comes by itself, so that nobody need look for it."""
        return self.follower.is_told

    @property
    def newest_seq(self) -> int:
        """Raises `NotTheWriter`."""
        raise self.refusal("a read at UNCOMMITTED")

    @property
    def staleness_ms(self) -> int:
        """Everything that was acknowledged so long ago has been applied."""
        return self.follower.staleness_ms

    @property
    def writer_address(self) -> str:
        """HOST:PORT of the writer, as the manifest says that was seen last; may be empty."""
        return self.manifest.current.writer_address

    def refusal(self, what: str) -> NotTheWriter:
        """The answer to who asks for `what`; and the manifest is asked whether it is still so."""
        self._manifest_asked.set()
        return NotTheWriter(what, writer_address=self.writer_address)

    def check_serving(self) -> None:
        """Raise what has ended this engine; a graceful close still answers reads."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # or it would grow with each call

    def committed(self, key: bytes) -> Entry | None:
        """The newest version of `key` in memory; None: what the levels hold counts."""
        return self.memtable.get(key)

    def newest(self, key: bytes) -> Entry | None:
        """Raises `NotTheWriter`."""
        del key
        raise self.refusal("a read at UNCOMMITTED")

    async def committed_view(self) -> ReadView:
        """What was applied."""
        return self._view()

    async def newest_view(self) -> ReadView:
        """Raises `NotTheWriter`."""
        raise self.refusal("a read at UNCOMMITTED")

    async def confirm(self) -> None:
        """Raises `NotTheWriter`: only the writer can tell that it has not been replaced."""
        raise self.refusal("a read at LINEARIZABLE")

    async def catch_up(self) -> None:
        """Look for news now, and return when that was done, whatever came of it."""
        self.check_serving()
        await self.follower.look()

    async def explain(self, missing: ObjectNotFound, held: PinnedVersion) -> ShaleError:
        """Why an object of a tree that is read is not there."""
        try:
            await self.manifest.refresh()
            is_protected = bool(held.snapshot_id) and self.levels.protects(held)
            if not is_protected:
                await self.levels.leave(held)
        except ShaleError as error:
            return error
        if is_protected:
            return missing
        return SnapshotNotFound(
            f"{missing.name} is gone: the levels of manifest {held.tree.manifest_id} are not "
            "protected any more, since this reader was stopped for long, or reads without a "
            "snapshot. Read again, from the beginning"
        )

    async def held_object(self, wal_id: int) -> Sst | None:
        """What was applied of an object that may not be in the store yet; None: it is there."""
        return await self._archive.held_object(wal_id)

    async def archive(self) -> None:
        """Return when all that is shown now is in the store. Raises `QuorumUnavailable`."""
        await self._archive.reach()

    async def load(self, last_wal_id: int | None, *, asked_ms: float) -> None:
        """Apply what was there when this replica joined, and keep it protected meanwhile.

        No more of it than memory holds: `run` goes on when the compactor has caught up.
        `asked_ms` is a moment of lapsed time before that was looked at.

        Raises `ObjectNotFound` when that was lost nevertheless: join again.
        """
        first = self.follower.next_wal_id
        end = first if last_wal_id is None else last_wal_id + 1
        failure: ShaleError | None = None
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._keep_tree(), name="keep the tree")
            try:
                await apply_in_order(
                    self._store,
                    range(first, end),
                    database_id=self.database_id,
                    memtable=self.memtable,
                    apply=self.applying.apply_object,
                    parallel_reads=self._settings.reader_parallel_reads,
                    is_full=self.follower.has_no_room,
                )
            except ShaleError as error:  # raised below, because the group would wrap it
                failure = error
            finally:
                keeping.cancel()
        if failure is not None:
            raise failure
        if not self.follower.may_leave_gaps and not self.follower.is_full:
            await self.follower.saw_end(asked_ms)

    def close(self) -> None:
        """`run` returns; reads are answered until the server ends."""
        self._closed.set()

    async def ended(self) -> ShaleError | None:
        """Wait until nothing more is followed: what ended it, None after `close`."""
        await self._closed.wait()
        return self._ended

    async def run(self) -> None:
        """Follow the writer until `close`, or raise what has ended it."""
        failure: ShaleError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(self._follow(), name="follow the log"),
                    tasks.create_task(self._tail(), name="tail the log"),
                    tasks.create_task(self._keep_tree(), name="keep the tree"),
                    tasks.create_task(self.levels.let_go(), name="let go of what is compacted"),
                    tasks.create_task(self.memtable.merge_when_due(self._clock), name="merge runs"),
                    tasks.create_task(self.levels.ssts.keep_on_disk(), name="keep on disk"),
                ]
                await self._closed.wait()
                for task in others:
                    task.cancel()
        finally:
            failure = self._ended
            self.prefix.fail(failure or Stopping("this reader is shutting down"))
        if failure is not None:
            raise failure

    async def leave(self, timeout_ms: float = LEAVE_TIMEOUT_MS) -> None:
        """Remove the snapshots of this process, as `VersionSet.close`.

        REQUIRES: nobody reads any more.
        """
        await self.levels.close(timeout_ms)

    async def _follow(self) -> None:
        try:
            await self.follower.run()
        except ShaleError as error:
            self._end(error)

    async def _tail(self) -> None:
        try:
            if self.follower.tailing is not None:
                await self.follower.tailing.run()
        except ShaleError as error:
            self._end(error)

    async def _keep_tree(self) -> None:
        """Follow the manifest, and renew the snapshot in time."""
        ttl_ms = 1_000 * self._settings.reader_snapshot_ttl_s
        interval_ms = min(self._settings.manifest_interval_ms, ttl_ms / 6)
        # However many writes are refused, each of which asks whether the writer is another one.
        least_ms = min(MANIFEST_APART_MS, self._settings.poll_interval_ms, interval_ms)
        while True:
            await self._clock.sleep_ms(least_ms)
            try:
                async with asyncio.timeout((interval_ms - least_ms) / 1_000):
                    await self._manifest_asked.wait()
            except TimeoutError:
                pass
            self._manifest_asked.clear()
            try:
                await self.manifest.refresh()
                await self._archive.look()
                await self.levels.keep()
            except StoreError as error:
                log.warning("the manifest could not be followed", error=str(error))
            except ShaleError as error:
                self._end(error)
                return

    def _end(self, error: ShaleError) -> None:
        self._ended = self._ended or error
        self._closed.set()

    def _view(self) -> ReadView:
        held = self.levels.current
        view = self.memtable.view(self.prefix.seq, self.prefix.wal_id)
        return view if held.tree.is_empty else view.above(held)

    def _jump(self, tree: Version) -> None:
        """Go on behind a tree that holds more than was applied: the log up to it may be gone."""
        if tree.wal_id is None:
            return
        log.warning("goes on behind the levels", wal_id=tree.wal_id, applied=self.prefix.wal_id)
        manifest = self.manifest.current  # which is not older than that of the tree
        self.applying.jump(
            tree, epoch=manifest.writer_epoch, logical_time_ms=manifest.logical_time_ms
        )

    async def _drop_through(self, seq: int) -> None:
        """Let go of what the levels hold."""
        await self.memtable.drop_through(seq, self._clock)
        self.levels.forget_dropped()
        if self.memtable.held_bytes > self.held_bytes_max:
            await self.shed_views()
