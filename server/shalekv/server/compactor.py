r"""The compactor role: merges the WAL into L0, and levels into levels, of one or more databases.

The compactor of one database works until another one takes over:

    claim the epoch --> read manifest and WAL --> pick --> run, publish --> read again ...
                                             \--> nothing due: wait for a poll, or a hurry

A merge of levels runs in a task beside the loop, so that compaction of the WAL does not wait for
its end: writes may be held back until the WAL is compacted. A crash at any point leaves objects
that no manifest names, and leases that expire. A *hurry* is a request to compact at once what holds
writes back.

A process has one compactor for each of its databases. It is opened, and compacts until an error:

    Superseded       another compactor has taken over: the database is given up
    StoreBroken      a sync of its folder has failed: the database is given up
    any other error  open again, after a wait that grows with each failure

Databases share only the permits of their merges: a failure of one does not hold up the others.
A process for a single database ends with its compactor; its parent decides what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
from structlog.contextvars import bound_contextvars

from shalekv.concurrency import IdlePoll
from shalekv.errors import (
    LeaseLost,
    ManifestConflict,
    ObjectNotFound,
    PartFailed,
    ShaleError,
    StoreBroken,
    StoreError,
    Superseded,
)
from shalekv.jobs.compact.claim import CompactorLeases, claim_compaction
from shalekv.jobs.compact.parts import OwnProcessParts, PartRunner
from shalekv.jobs.compact.run import CompactionCounters, Compactions, ProcessMerges, list_backlog
from shalekv.protocol.compaction.jobs import MergeJob, WalJob
from shalekv.protocol.compaction.policy import CompactionState, LeveledPolicy
from shalekv.protocol.compaction.publish import CompactorId, reservations
from shalekv.protocol.manifest import Manifest, Version
from shalekv.runtime import Runtime
from shalekv.settings import CompactorConfig
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.counting import StoreCallCounts
from shalekv.store.manifests import CompactorManifest
from shalekv.store.retry import Backoff
from shalekv.telemetry.tracing import Tracer
from shalekv.write.logical_time import StoreTime

# Merges of the WAL that may run at once, and as many of levels: a merge that waits for a slow store
# does not hold up those of other databases.
MERGES_MAX = 2
RETRY_MS_MAX = 60_000
CLOSE_S = 2  # timeout for giving up leases; those that are left expire
_FAILURES_MAX = 10  # in a row; an object that is missing after so many will not come back
_CLOCK_INTERVAL_MS = 60_000  # between requests for the store's clock

log = structlog.get_logger()


class _Hurry:
    """A request to compact at once everything that is in the WAL when it is accepted."""

    def __init__(self, requested: asyncio.Event) -> None:
        """`requested` is set by the owner of the compactor."""
        self._requested = requested
        self._end_wal_id = 0

    @property
    def is_requested(self) -> bool:
        """Return whether there is a request that is not accepted yet."""
        return self._requested.is_set()

    def accept(self, end_wal_id: int) -> None:
        """Accept a request, if there is one: it concerns the slots before `end_wal_id`."""
        if self._requested.is_set():
            self._requested.clear()
            self._end_wal_id = end_wal_id

    def concerns(self, wal_id: int) -> bool:
        """Return whether a request that was accepted asks to compact this slot at once."""
        return wal_id < self._end_wal_id

    async def wait_requested(self) -> None:
        """Wait for a request."""
        await self._requested.wait()


class _BackgroundMerge:
    """The merge of levels that runs beside the loop of a compactor; one at a time."""

    def __init__(self) -> None:
        """Begin without a merge."""
        self._task: asyncio.Task[None] | None = None
        self._failure: ShaleError | None = None
        self._ended = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Return whether a merge runs."""
        return self._task is not None

    @property
    def has_ended(self) -> bool:
        """Return whether a merge has ended since `raise_failure` was called last."""
        return self._ended.is_set()

    def raise_failure(self) -> None:
        """Raise the error of the merge that has ended, once."""
        self._ended.clear()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def start(self, tasks: asyncio.TaskGroup, run: Callable[[], Awaitable[object]]) -> None:
        """Start a merge in `tasks`. REQUIRES: none runs."""
        self._task = tasks.create_task(self._guarded(run))

    def cancel(self) -> None:
        """Cancel the merge that runs, if there is one."""
        if self._task is not None:
            self._task.cancel()

    async def wait_end(self) -> None:
        """Wait until a merge has ended, as `has_ended` says."""
        await self._ended.wait()

    async def _guarded(self, run: Callable[[], Awaitable[object]]) -> None:
        try:
            await run()
        except ShaleError as error:
            self._failure = error
        finally:
            self._task = None
            self._ended.set()


class Compactor:
    """The compactor of one database."""

    def __init__(
        self,
        store: CasStore,
        manifest: CompactorManifest,
        leases: CompactorLeases,
        settings: CompactorConfig,
        *,
        hurry: asyncio.Event,
        parts: PartRunner,
        merges: ProcessMerges | None,
    ) -> None:
        """Compose a compactor; called by `Compactor.open`."""
        self._store = store
        self._manifest = manifest
        self._leases = leases
        self._hurry = _Hurry(hurry)
        self._policy = LeveledPolicy(settings.compactor, settings.levels)
        self._compactions = Compactions(store, manifest, leases, settings, parts, merges)
        self._merge = _BackgroundMerge()
        self._store_time = StoreTime(store, _CLOCK_INTERVAL_MS)
        idle_poll_ms = settings.compactor.compactor_idle_poll_ms
        self._poll = IdlePoll(settings.compactor.poll_ms, idle_poll_ms)
        first_ms, longest_ms = store.backoff.first_ms, store.backoff.longest_ms
        self._failing = Backoff(first_ms, max(longest_ms, idle_poll_ms))

    @classmethod
    async def open(  # noqa: PLR0913 - what it shares with others of its process
        cls,
        store: ObjectStore,
        *,
        settings: CompactorConfig,
        runtime: Runtime,
        hurry: asyncio.Event,
        parts: PartRunner | None = None,
        merges: ProcessMerges | None = None,
        counts: StoreCallCounts | None = None,
        holder: str = "compactor",
        after: CompactorId | None = None,
    ) -> Compactor:
        """Take over from any other compactor of the database in `store`.

        With `after`, take over from that compactor only, as `claim_compaction`. `hurry` is set by
        the caller when uncompacted data holds writes back, and cleared here. `parts` runs the parts
        of merges; by default this process does, one after the other. `merges` are those of all
        databases of this process. Its requests are counted in `counts`.

        Raises `DatabaseNotFound`, `CorruptObject`, `StoreError`; `Superseded` when another one has
        taken over from `after`.
        """
        cas = CasStore(store, runtime, settings.store, counts=counts)
        leases = CompactorLeases(cas, ttl_s=settings.compactor.compactor_lease_ttl_s, holder=holder)
        manifest = await claim_compaction(cas, leases, after=after)
        log.info("compacting", epoch=manifest.own.epoch, url=store.url)
        return cls(
            cas,
            manifest,
            leases,
            settings,
            hurry=hurry,
            parts=parts or OwnProcessParts(cas),
            merges=merges,
        )

    @property
    def epoch(self) -> int:
        """The epoch that this compactor has won."""
        return self._manifest.own.epoch

    @property
    def counters(self) -> CompactionCounters:
        """Counts of what this compactor has done so far."""
        return self._compactions.counters

    @property
    def own(self) -> CompactorId:
        """The epoch that this compactor has won, and its nonce."""
        return self._manifest.own

    async def run(self, *, is_once: bool = False) -> None:
        """Compact until cancelled; with `is_once`, until nothing is due.

        Raises `Superseded` when another compactor has taken over, and errors that are permanent:
        damaged objects, a store that cannot be written to. With `is_once`, also an error that has
        occurred `_FAILURES_MAX` times in a row.
        """
        failure: ShaleError | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._loop(tasks, is_once=is_once)
            except ShaleError as error:  # raised below, because the group would wrap it
                failure = error
            finally:
                self._merge.cancel()
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Give up the leases. REQUIRES: `run` has ended.

        Objects that were not published are garbage from now on.
        """
        await self._leases.release(self._manifest)

    async def _loop(self, tasks: asyncio.TaskGroup, *, is_once: bool) -> None:
        failures = 0
        while True:
            jobs = self.counters.jobs
            try:
                is_busy = await self._step(tasks)
            except StoreBroken:
                raise
            except (StoreError, LeaseLost, PartFailed, ManifestConflict) as error:
                failures = failures + 1 if self.counters.jobs == jobs else 1
                log.warning("compaction failed", failures=failures, problem=str(error))
                may_be_permanent = is_once or isinstance(error, ObjectNotFound)
                if may_be_permanent and failures >= _FAILURES_MAX:
                    raise
                await self._pause(failures)
                continue
            if self.counters.jobs > jobs:
                failures = 0
            if is_busy:
                continue
            if is_once and not self._merge.is_running:
                return
            await self._wait(self._poll.wait_ms)

    async def _pause(self, failures: int) -> None:
        """Wait after so many failures in a row: longer each time, since each may cost a merge.

        A hurry ends the wait, but not before the longest delay of the store's own retries.
        """
        wait_ms = self._failing.wait_ms(failures, self._store.runtime.random)
        at_least_ms = min(wait_ms, self._store.backoff.longest_ms)
        await self._store.runtime.clock.sleep_ms(at_least_ms)
        if wait_ms > at_least_ms:
            await self._wait(wait_ms - at_least_ms)

    async def _step(self, tasks: asyncio.TaskGroup) -> bool:
        """Read the state once, and do the job that is due.

        Returns True if there may be more to do at once.
        """
        self._merge.raise_failure()
        manifest = await self._manifest.refresh()
        state = await self._read_state(manifest)
        if self._merge.has_ended:  # meanwhile: the state may be outdated
            return True
        job = self._policy.pick(state)
        if isinstance(job, WalJob) or (
            job is not None and job.is_move and not self._merge.is_running
        ):
            await self._compactions.run(job, manifest, state.version, self._is_hurried)
            return True
        if isinstance(job, MergeJob) and not self._merge.is_running:
            run = self._compactions.run
            merge = partial(run, job, manifest, state.version, self._is_hurried)
            self._merge.start(tasks, merge)
        return False

    async def _read_state(self, manifest: Manifest) -> CompactionState:
        now_ms = await self._store_time.now_ms()  # only the choice of jobs depends on it
        first = manifest.first_uncompacted_wal_id
        wal = await list_backlog(self._store, first, now_ms)
        self._poll.observe((manifest.manifest_id, first + wal.filled))
        self._hurry.accept(first + wal.filled)
        reserved = [lease.reserved_seq or 0 for lease in reservations(manifest, now_ms)]
        return CompactionState(
            Version.of(manifest),
            wal,
            is_hurried=self._hurry.concerns(first),
            now_ms=now_ms,
            reserved_seq=max(reserved, default=None),
        )

    def _is_hurried(self) -> bool:
        first = self._manifest.current.first_uncompacted_wal_id
        return self._hurry.is_requested or self._hurry.concerns(first)

    async def _wait(self, longest_ms: float) -> None:
        """Wait for `longest_ms`, for a hurry, or for the end of the merge."""
        async with asyncio.TaskGroup() as waits:
            reasons = (
                waits.create_task(self._store.runtime.clock.sleep_ms(longest_ms)),
                waits.create_task(self._hurry.wait_requested()),
                waits.create_task(self._merge.wait_end()),
            )

            def end(_first: object) -> None:
                for reason in reasons:
                    reason.cancel()

            for reason in reasons:
                reason.add_done_callback(end)


@dataclass(frozen=True, slots=True)
class CompactionTarget:
    """Store of one database to compact, and the workers for its merges."""

    store: ObjectStore
    runtime: Runtime
    parts: PartRunner
    counts: StoreCallCounts = field(default_factory=StoreCallCounts)  # several may share them


class Compactors:
    """The compactors of one process. At most `MERGES_MAX` merges of a kind run at once."""

    def __init__(
        self,
        targets: Sequence[CompactionTarget],
        settings: CompactorConfig,
        *,
        hurry: asyncio.Event | None = None,
        holder: str = "compactor",
        tracer: Tracer | None = None,
    ) -> None:
        """REQUIRES: `targets` is not empty; `hurry` is given for a single database only."""
        settings = settings if len(targets) == 1 else _with_shared_rate(settings)
        merges = ProcessMerges(MERGES_MAX, tracer)
        self.done = merges.done  # by all of them, since the process began
        self._databases = [
            _Database(target, settings, merges, hurry or asyncio.Event(), holder)
            for target in targets
        ]

    async def run(self) -> None:
        """Compact until cancelled.

        With a single database, raises the error that has ended its compactor. With several, each
        compactor is restarted until its database is given up; when all are, raises the first
        `StoreBroken`, or else `Superseded`.
        """
        if len(self._databases) == 1:
            await self._databases[0].compact()
            return
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(each.compact_repeatedly()) for each in self._databases]
        errors = [each.result() for each in loops]
        raise next((error for error in errors if not isinstance(error, Superseded)), errors[0])

    async def run_once(self) -> Sequence[Exception | None]:
        """Do the jobs that are due now, and return the error of each database, or None.

        With several databases errors are logged as well.
        """
        is_logged = len(self._databases) > 1
        async with asyncio.TaskGroup() as tasks:
            once = [
                tasks.create_task(each.compact_once(is_logged=is_logged))
                for each in self._databases
            ]
        return [each.result() for each in once]


class _Database:
    """One of the databases, and the epoch of its last compactor in this process."""

    def __init__(
        self,
        target: CompactionTarget,
        settings: CompactorConfig,
        merges: ProcessMerges,
        hurry: asyncio.Event,
        holder: str,
    ) -> None:
        """Open nothing yet."""
        self._target = target
        self._settings = settings
        self._merges = merges
        self._hurry = hurry
        self._holder = holder
        self._own: CompactorId | None = None
        self._opened_ms: float | None = None  # when the current compactor took over

    async def compact_repeatedly(self) -> Superseded | StoreBroken:
        """Compact, and restart after any error, until one comes for which the database is given up.

        Returns that error.
        """
        clock, random = self._target.runtime.clock, self._target.runtime.random
        backoff, failures = Backoff(self._settings.compactor.poll_ms, RETRY_MS_MAX), 0
        while True:
            self._opened_ms = None
            error = await self._compact_until_error()
            if isinstance(error, Superseded | StoreBroken):
                self._log().error("database given up", reason=error.reason, problem=str(error))
                return error
            opened_ms = self._opened_ms
            if opened_ms is not None and clock.monotonic_ms() - opened_ms >= RETRY_MS_MAX:
                failures = 0
            failures += 1
            wait_ms = backoff.wait_ms(failures, random)
            self._log_error(error, retry_ms=round(wait_ms))
            await clock.sleep_ms(wait_ms)

    async def compact_once(self, *, is_logged: bool) -> Exception | None:
        """Do the jobs that are due now; returns the error that has ended them."""
        try:
            await self.compact(is_once=True)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            if is_logged:
                self._log_error(error)
            return error
        return None

    async def compact(self, *, is_once: bool = False) -> None:
        """Take over, compact, and give up the leases. Raises as `Compactor.open` and `run`."""
        with bound_contextvars(url=self._target.store.url):
            compactor = await Compactor.open(
                self._target.store,
                settings=self._settings,
                runtime=self._target.runtime,
                hurry=self._hurry,
                parts=self._target.parts,
                merges=self._merges,
                counts=self._target.counts,
                holder=self._holder,
                after=self._own,
            )
            self._own = compactor.own
            self._opened_ms = self._target.runtime.clock.monotonic_ms()
            try:
                await compactor.run(is_once=is_once)
            finally:
                await _close(compactor)

    async def _compact_until_error(self) -> Exception:
        try:
            await self.compact()
        except Exception as error:  # noqa: BLE001 - logged, and the other databases go on
            return error
        raise AssertionError("a compactor goes on until something ends it")

    def _log_error(self, error: Exception, **details: object) -> None:
        if isinstance(error, ShaleError):  # logged without a traceback, which would add nothing
            fields = {"reason": error.reason, "problem": str(error)}
            self._log().error("compactor ended by an error", **fields, **details)
        else:
            ended = "compactor ended by an unexpected error"
            self._log().error(ended, exc_info=error, **details)

    def _log(self) -> structlog.stdlib.BoundLogger:
        bound: structlog.stdlib.BoundLogger = log.bind(url=self._target.store.url)
        return bound


async def _close(compactor: Compactor) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await compactor.close()
    except (ShaleError, TimeoutError) as error:
        log.debug("leases are left to expire", problem=str(error))


def _with_shared_rate(settings: CompactorConfig) -> CompactorConfig:
    """Divide `compaction_rate_bytes`, the limit of the process, among its concurrent merges."""
    shared = -(-settings.compactor.compaction_rate_bytes // MERGES_MAX)  # 0 stays 0: no limit
    update = {"compaction_rate_bytes": shared}
    return settings.model_copy(update={"compactor": settings.compactor.model_copy(update=update)})
