"""The engine of a writer: its parts wired together, and the operations that need several of them.

It knows neither requests nor transports. Embedded in a process, it is a database without a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shalekv.clock import Clock
from shalekv.concurrency import SingleFlight
from shalekv.errors import (
    ObjectNotFound,
    ShaleError,
    SnapshotNotFound,
    Stopping,
    StoreError,
)
from shalekv.format.sst import Sst
from shalekv.protocol.entry import Entry
from shalekv.read.engine import ShedViews, shed_nothing
from shalekv.read.memtable import Memtable
from shalekv.read.read_pins import ReadPins
from shalekv.read.read_set import ReadSet
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.read.version_set import RELEASE_TIMEOUT_MS, VersionSet
from shalekv.read.watermark import Watermark
from shalekv.settings import LevelSettings, LimitSettings, WriterSettings
from shalekv.store.manifests import WriterManifest
from shalekv.telemetry.tracing import Tracer
from shalekv.watch.change_event import AppliedObject
from shalekv.watch.feed import CommitFeed, FeedPosition
from shalekv.write.admission import Admission, CompactionBacklog
from shalekv.write.commit import Group
from shalekv.write.expiry_sweep import ExpirySweep
from shalekv.write.group_commit import GroupCommit
from shalekv.write.idempotency import Idempotency
from shalekv.write.ingest import LoadRegistry, Loads
from shalekv.write.pending_writes import NewestState, PendingWrites
from shalekv.write.prefetch import Prefetch
from shalekv.write.recovery import RecoveredLog
from shalekv.write.wal import Safekeepers, WriteAheadLog

log = structlog.get_logger()

STEP_MS = 200  # a longer wait checks so often whether the poll interval has become shorter


class Ownership:
    """Watches the manifest for another writer: polls it, and confirms ownership on demand.

    One task asks the store. Linearizable reads wait for an answer to a request that was sent after
    they arrived, and share it.
    """

    def __init__(
        self,
        manifest: WriterManifest,
        *,
        poll_ms: Callable[[], int],
    ) -> None:
        """Poll every `poll_ms` milliseconds, and on demand."""
        self.manifest = manifest
        self.seen = asyncio.Event()  # set by each poll that found no other writer
        self._poll_ms = poll_ms
        self._polls = SingleFlight()

    async def run(self) -> ShaleError:
        """Poll until another writer has taken over, or the manifest is damaged; returns that error.

        When the store does not answer, waiting calls get its error, and polling continues.
        """
        ended: ShaleError = Stopping("this writer is shutting down")
        try:
            while True:
                await self._wait_until_due()
                self._polls.begin()
                try:
                    await self.manifest.refresh()
                except StoreError as error:
                    log.warning("could not look for another writer", error=str(error))
                    self._polls.answer(error)
                except ShaleError as error:
                    ended = error
                    return error
                else:
                    self._polls.answer()
                    self.seen.set()
        finally:
            self.end(ended)

    def end(self, error: ShaleError) -> None:
        """Fail waiting and later calls of `confirm` with `error`. The first call of `end` counts.

        REQUIRES: `run` has returned, or never began.
        """
        self._polls.end(error)

    async def confirm(self) -> None:
        """Confirm, by a request that is sent after this call, that no other writer has taken over.

        Raises `Fenced`, and `StoreUnavailable` when the store does not answer.
        """
        await self._polls.next()

    async def _wait_until_due(self) -> None:
        self._polls.asked.clear()
        if self._polls.is_wanted:
            return
        left_ms = self._poll_ms()
        while left_ms > 0:
            step_ms = min(left_ms, STEP_MS)
            try:
                async with asyncio.timeout(step_ms / 1000):
                    await self._polls.asked.wait()
            except TimeoutError:
                left_ms = min(left_ms - step_ms, self._poll_ms())
            else:
                return


async def run_until_archived(commits: GroupCommit, archive: Callable[[], Awaitable[None]]) -> None:
    """Run the log until it is closed or stopped; if it was closed, until all of it is archived.

    Then readers of the object store alone find everything that was acknowledged. If archiving
    fails, that is logged: safekeepers have the rest of the log, and the next writer archives it.
    """
    await commits.run()
    if not commits.is_closing:
        return
    problem = "there was no time left"
    try:
        await archive()
        problem = ""
    except ShaleError as error:
        problem = str(error)
    finally:  # also when cancelled
        if problem:
            log.warning("the end of the log is in the safekeepers alone", problem=problem)


async def limit_shutdown(
    admission: Admission, end: asyncio.Task[None], clock: Clock, *, grace_ms: float
) -> None:
    """Cancel `end` if it is not done `grace_ms` after the log, and so `admission`, was closed."""
    await admission.closed.wait()
    await clock.sleep_ms(grace_ms)
    end.cancel()


async def explain_missing(
    missing: ObjectNotFound, pinned: PinnedVersion, ownership: Ownership, levels: VersionSet
) -> ShaleError:
    """Find out why an object of the levels is missing.

    Returns `SnapshotNotFound` when nothing protects `pinned` any more; else `missing`, or the error
    that ends this writer.
    """
    try:
        await ownership.confirm()
    except ShaleError as error:
        return error
    if levels.pins.protects(pinned):
        return missing
    return SnapshotNotFound(
        f"{missing.name} is gone: the snapshot that protected the levels of manifest "
        f"{pinned.version.manifest_id} has expired, because this process was stopped for long. "
        "Read again, from the beginning"
    )


class WriterEngine:
    """Writes, reads and background tasks of one opening of a database."""

    def __init__(
        self,
        opened: RecoveredLog,
        settings: WriterSettings,
        clock: Clock,
        *,
        limits: LimitSettings | None = None,
        levels: LevelSettings | None = None,
        shed_views: ShedViews = shed_nothing,
        tracer: Tracer | None = None,
    ) -> None:
        """Build the parts of a writer of the log that was opened.

        `shed_views` is called when the views of reads keep too much in memory. `tracer` records
        groups of commits.
        """
        self._clock = clock
        self.safekeepers, self.time = opened.safekeepers, opened.time
        idempotency = Idempotency(
            window_ms=settings.idempotency_window_s * 1000, now_ms=self.time.now_ms
        )
        idempotency.land(opened.records)
        self.backlog = CompactionBacklog(
            settings,
            clock,
            opened.memtable,
            idempotency,
            load_count=lambda: self.levels.load_count,
            shed_views=shed_views,
        )
        self.feed = CommitFeed(self._position)
        self.snapshots = SnapshotViews(
            opened.store, opened.manifest, opened.version.ssts, limits or LimitSettings()
        )
        self.ownership = Ownership(opened.manifest, poll_ms=self.backlog.poll_ms)
        watermark = Watermark(seq=opened.last_seq, wal_id=opened.last_wal_id)
        self.levels = self._version_set(opened, watermark)
        self.log = GroupCommit(
            wal=opened.wal,
            database=self,
            admission=Admission(
                settings,
                memtable_bytes=lambda: self.backlog.memory_bytes,
                explain=self._explain_queue,
            ),
            watermark=watermark,
            policy=opened.policy,
            pending_writes=PendingWrites(opened.memtable),
            clock=clock,
            next_seq=opened.first_seq,
            tracer=tracer,
        )
        self.prefetch = self._prefetch()
        self.loads = self._loads(opened, levels or LevelSettings())
        self.expiry = ExpirySweep(self, settings, clock, replayed=opened.loads)

    def _version_set(self, opened: RecoveredLog, watermark: Watermark) -> VersionSet:
        pins = ReadPins(
            opened.store,
            opened.manifest,
            opened.version.snapshot_id,
            ttl_s=self.backlog.settings.snapshot_ttl_s,
            accept_ms=self.time.follow,
        )
        return VersionSet(
            opened.store,
            pins,
            opened.version,
            loads=opened.loads,
            memtable=self.memtable,
            watermark=watermark,
            drop_through=self._drop_through,
        )

    def _prefetch(self) -> Prefetch:
        return Prefetch(
            levels=self.levels,
            log=self.log,
            memtable=self.memtable,
            state=self.newest_state,
            now_ms=self.time.now_ms,
            explain_missing=self._explain_missing,
        )

    def _loads(self, opened: RecoveredLog, levels: LevelSettings) -> Loads:
        """Build the loads of this opening, beginning with those that were replayed."""
        registry = LoadRegistry(
            opened.store,
            opened.manifest,
            time=self.time,
            snapshot_ttl_s=self.backlog.settings.snapshot_ttl_s,
            keep=self.levels.pins.keep_load,
        )
        loads = Loads(
            opened.store,
            registry,
            self.log,
            self.admission,
            levels,
            time=self.time,
            wait_for_budget=self.backlog.wait_for_loads,
        )
        for load in opened.loads:
            loads.land(load)
        return loads

    @property
    def manifest(self) -> WriterManifest:
        """The manifest, which this writer edits as long as it owns the database."""
        return self.ownership.manifest

    @property
    def memtable(self) -> Memtable:
        """Durable entries that are not compacted."""
        return self.backlog.memtable

    @property
    def idempotency(self) -> Idempotency:
        """The idempotency keys that were used, and those in flight."""
        return self.backlog.idempotency

    @property
    def wal(self) -> WriteAheadLog:
        """The storage of the log, below group commit."""
        return self.log.wal

    @property
    def admission(self) -> Admission:
        """Decides which writes may enter the log."""
        return self.log.admission

    @property
    def watermark(self) -> Watermark:
        """The durable watermark."""
        return self.log.watermark

    @property
    def direct_ingest_bytes(self) -> int:
        """Batches of more bytes do not go through the memtable."""
        return self.backlog.settings.direct_ingest_bytes

    @property
    def database_id(self) -> bytes:
        """The id of the database, 16 bytes."""
        return self.manifest.current.database_id

    @property
    def epoch(self) -> int:
        """The epoch of this writer."""
        return self.manifest.own.epoch

    @property
    def pinned(self) -> PinnedVersion:
        """The levels that a new read uses."""
        return self.levels.current

    def _position(self) -> FeedPosition:
        return FeedPosition(self.watermark.seq, self.watermark.wal_id, is_open=self.wal.is_ordered)

    async def unarchived_object(self, wal_id: int) -> Sst | None:
        """Read what has landed of a WAL object that may not be in the store; None: it is there."""
        return await self.safekeepers.unarchived(wal_id) if self.safekeepers is not None else None

    async def archive(self, wal_id: int | None = None) -> None:
        """Wait until a WAL object that has landed, and all before it, are in the store.

        None: all that has landed. Raises as `Safekeepers.archive`.
        """
        if self.safekeepers is not None:
            await self.safekeepers.archive(wal_id)

    @property
    def newest_seq(self) -> int:
        """The greatest sequence number that was issued."""
        return self.log.next_seq - 1

    @property
    def staleness_ms(self) -> int:
        """Always 0: a writer is never behind."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """Accounted memory of what is not compacted, or kept for scans."""
        return self.backlog.memory_bytes

    @property
    def held_bytes_max(self) -> int:
        """Limit of the memory of entries that are compacted, but kept for scans begun before."""
        return self.backlog.held_bytes_max

    @property
    def is_pressed(self) -> bool:
        """Return whether uncompacted writes or loads use more than half of what they may."""
        return self.backlog.is_pressed

    def now_ms(self) -> int:
        """The logical time by which reads judge expiry (protocol, "Range deletes and expiry").

        A value that a transaction has found does not expire before the transaction is settled.
        """
        return min(self.time.now_ms(), self.log.pending_writes.holds_until_ms)

    def check_serving(self) -> None:
        """Raise the error that stopped the log. Reads are still answered after a graceful close."""
        stopped_by = self.log.stopped_by
        if stopped_by is not None and not self.log.is_closing:
            raise stopped_by.with_traceback(None)  # else the traceback would grow with each call

    def committed(self, key: bytes) -> Entry | None:
        """The newest durable version of `key` in memory; None: the levels decide."""
        return self.memtable.get(key)

    def newest(self, key: bytes) -> Entry | None:
        """The newest version of `key` in memory, durable or not; None: the levels decide."""
        return self.log.pending_writes.get(key)

    async def committed_view(self) -> ReadView:
        """The durable prefix, once it covers all that was acknowledged before this call."""
        await self.watermark.wait_for(self.watermark.landed_seq)
        return self._view(self.watermark.seq)

    async def newest_view(self) -> ReadView:
        """Everything written by now, durable or not."""
        view = self._view(self.newest_seq)
        landed_ahead = self.log.runs_ahead
        not_durable = await self.log.pending_writes.runs(
            self._clock, max_seq=view.seq
        )  # as it is now
        return view.with_newer([*landed_ahead, *not_durable])

    def _view(self, seq: int) -> ReadView:
        pinned = self.levels.current
        view = self.memtable.view(seq, self.watermark.wal_id)
        return view if pinned.version.is_empty else view.with_levels(pinned)

    async def confirm(self) -> None:
        """Confirm, by a request that is sent after this call, that no other writer has taken over.

        Raises `Fenced` and `StoreUnavailable`.
        """
        await self.ownership.confirm()

    @property
    def is_pushed(self) -> bool:
        """Always True: this process makes every commit, so there is nothing to poll for."""
        return True

    async def catch_up(self) -> None:
        """Return at once: a writer is never behind."""

    async def explain(self, missing: ObjectNotFound, pinned: PinnedVersion) -> ShaleError:
        """Find out why an object of a version that is being read is missing.

        Either this process was stopped until its snapshot had expired: then new reads use a new
        version, unless another writer has taken over. Or a protected object was deleted.
        """
        reason = await self._explain_missing(missing, pinned)
        if isinstance(reason, SnapshotNotFound):
            try:
                await self.levels.follow_manifest()
            except ShaleError as error:
                return error
        return reason

    async def _explain_missing(self, missing: ObjectNotFound, pinned: PinnedVersion) -> ShaleError:
        return await explain_missing(missing, pinned, self.ownership, self.levels)

    def newest_state(self, pending_writes: PendingWrites, read_set: ReadSet) -> NewestState:
        """The state by which a transaction is decided that follows all pending writes."""
        view = self.memtable.view(self.watermark.seq, self.watermark.wal_id)
        durable = view.with_newer(self.log.runs_ahead)
        return NewestState(pending_writes, durable, self.time.now_ms(), read_set)

    def _explain_queue(self) -> str:
        """Say what keeps the queue from moving; empty if nothing does."""
        trouble = self.wal.trouble(after_ms=0.0)
        return "" if trouble is None else trouble.text(self._clock.monotonic_ms())

    def close(self) -> None:
        """Accept no more writes; `run` returns when all accepted ones are durable."""
        self.log.close()

    async def run(self, *, stop_grace_ms: float) -> None:
        """Run until all is in the object store after `close`, or raise the error that stopped the
        log.

        Once the log accepts no more, uploads in flight get `stop_grace_ms` to learn their outcome.
        Then their writes end with an unknown outcome, and `run` raises `Stopping` after a `close`.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                ending = run_until_archived(self.log, self.archive)
                end = tasks.create_task(ending, name="group commit")
                bound = limit_shutdown(self.admission, end, self._clock, grace_ms=stop_grace_ms)
                others = [
                    tasks.create_task(self._watch_ownership(), name="watch for another writer"),
                    tasks.create_task(self._follow_manifest(), name="follow the manifest"),
                    tasks.create_task(self.levels.pruner.run(), name="drop what is compacted"),
                    tasks.create_task(self.loads.drop_abandoned(), name="drop abandoned loads"),
                    tasks.create_task(self.memtable.merge_when_due(self._clock), name="merge runs"),
                    tasks.create_task(self.expiry.run(), name="sweep what expires"),
                    tasks.create_task(self.levels.ssts.write_disk_cache(), name="cache on disk"),
                    tasks.create_task(bound, name="limit the shutdown"),
                ]
                if self.safekeepers is not None:
                    following = self._follow_safekeepers(self.safekeepers)
                    others.append(tasks.create_task(following, name="follow the safekeepers"))
                await asyncio.wait([end])
                for task in others:
                    task.cancel()
        finally:  # a task that is cancelled before its first step cannot do this itself
            self.log.end()
            self.ownership.end(Stopping("this writer has stopped"))
        if not self.log.is_closing and self.log.stopped_by is not None:
            raise self.log.stopped_by

    async def _watch_ownership(self) -> None:
        self.log.stop(await self.ownership.run())

    async def _follow_safekeepers(self, safekeepers: Safekeepers) -> None:
        try:
            await safekeepers.run(self.log.pending_replies.fail_all)
        except ShaleError as error:
            self.log.stop(error)

    async def release(self, timeout_ms: float = RELEASE_TIMEOUT_MS) -> None:
        """Remove the snapshots of this process, as `VersionSet.close`.

        REQUIRES: no reads are in progress.
        """
        await self.levels.close(timeout_ms)

    def land(self, group: Group) -> None:
        """Take a durable group into memory. Groups before it may not be durable yet."""
        self.memtable.land(group.run, first_seq=group.commits[0].seq)
        self.expiry.land(group)

    def publish(self, group: Group) -> None:
        """Show a group to scans and watches. It has landed, and all before it as well."""
        before = self._view(self.watermark.seq) if self.feed.wants_previous else None
        self.memtable.extend_prefix(group.run)
        if not self.feed.is_idle:
            contents = group.contents()
            obj = AppliedObject(
                group.wal_id, group.max_seq, contents.points, contents.range_tombstones, group.load
            )
            self.feed.applied(obj, before)
        if group.load is not None:  # it is alone in flight, so memory holds everything older
            self.log.pending_writes.drop_durable_range_deletes()
            self.levels.land_load(group.load, self.loads.land(group.load))

    async def _follow_manifest(self) -> None:
        """Follow the manifest, and renew snapshots in time, until another error ends the log."""
        while True:
            try:
                async with asyncio.timeout(self.backlog.settings.snapshot_ttl_s / 6):
                    await self.ownership.seen.wait()
            except TimeoutError:
                pass  # it may be time to renew the snapshots
            self.ownership.seen.clear()
            try:
                await self.levels.follow_manifest()
            except StoreError as error:
                log.warning("the manifest could not be followed", error=str(error))
            except ShaleError as error:
                self.log.stop(error)
                return

    async def _drop_through(self, seq: int) -> None:
        """Drop from memory what the levels hold up to sequence number `seq`."""
        self.log.pending_writes.drop_durable_range_deletes()  # its range deletes outlive the puts
        await self.memtable.drop_through(seq, self._clock)
        self.levels.release_dropped()
        await self.idempotency.drop_through(seq, self._clock)
        self.admission.admit_waiting()  # before shedding, which may take a while
        if await self.backlog.shed_views():
            self.admission.admit_waiting()
