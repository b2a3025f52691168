"""Group commit of the members of a node: one sync for many appends.

    has_space = log.has_space(records) or await syncer.make_space(log, records)
    state, effects = step(state, stream, message, has_space=has_space)  # no await between the two
    durable = syncer.submit(log, effects)                         # queued, in this order
    flushed_lsn = await durable                                   # then the reply may be sent

While one batch is written to the disk, the next one collects.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass, field

from shalekv.protocol.quorum.acceptor import Effect
from shalekv.protocol.quorum_records import LogEnd, Record
from shalekv.runtime import Workers
from shalekv.store.safekeeper_log.index import frame_bytes
from shalekv.store.safekeeper_log.log import MemberLog


@dataclass(frozen=True, slots=True, eq=False)
class _Effects:
    log: MemberLog
    effects: Sequence[Effect]
    done: Future[int]


@dataclass(frozen=True, slots=True, eq=False)
class _MakeSpace:
    log: MemberLog
    sizes: Sequence[int]
    done: Future[int]  # 1: there is space; 0: the disk is full


@dataclass(frozen=True, slots=True, eq=False)
class _Trim:
    log: MemberLog
    base: LogEnd
    done: Future[int]


_Job = _Effects | _MakeSpace | _Trim


@dataclass(slots=True)
class _Queue:
    jobs: list[_Job] = field(default_factory=list)
    error: BaseException | None = None  # why no more jobs are accepted


class Syncer:
    """Performs the jobs for all members of a node, with one worker at a time.

    `run` must be a task of the owner's group. When it has ended, a worker may still write a batch:
    the owner closes the workers before the logs.
    """

    def __init__(self, workers: Workers) -> None:
        """Perform nothing before `run`. Only `workers` touch the files of the logs."""
        self.workers = workers
        self._queue = _Queue()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Perform submitted jobs until cancelled.

        Raises `StoreBroken` when the disk has failed: the process must end.
        """
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._perform()
        except BaseException as error:
            self._queue.error = error
            for job in self._queue.jobs:
                _fail(job, error)
            self._queue.jobs.clear()
            raise

    def submit(self, log: MemberLog, effects: Sequence[Effect]) -> Future[int]:
        """Queue effects; the future is done when they are durable, with the log's `durable_lsn`.

        Effects of one log are applied in the order of the calls. A `Reply` is left to the caller,
        and `CommittedUpTo` is kept as a hint for the next start. Cancelling the future does not
        stop the effects. The future raises `StoreBroken` when the disk has failed: the caller must
        not acknowledge anything then.
        """
        log.submitted(effects)
        return self._add(_Effects(log, effects, _future()))

    async def make_space(self, log: MemberLog, records: Sequence[Record]) -> bool:
        """Allocate space for records after all that was submitted; False: the disk is full."""
        sizes = [frame_bytes(record) for record in records]
        return bool(await self._add(_MakeSpace(log, sizes, _future())))

    async def trim(self, log: MemberLog, base: LogEnd) -> None:
        """Trim a log, after everything submitted before."""
        await self._add(_Trim(log, base, _future()))

    def _add(self, job: _Job) -> Future[int]:
        if self._queue.error is not None:
            _fail(job, self._queue.error)
        else:
            self._queue.jobs.append(job)
            self._wake.set()
        return job.done

    async def _perform(self) -> None:
        batch = tuple(self._queue.jobs)
        self._queue.jobs.clear()
        if not batch:
            return
        try:
            results = await self.workers.run(_perform, batch)
        except BaseException as error:
            for job in batch:
                _fail(job, error)
            raise
        for job, result in zip(batch, results, strict=True):
            if not job.done.done():
                job.done.set_result(result)
        low = tuple({job.log: None for job in batch if job.log.wants_spare})
        if low:
            await self.workers.run(_prepare, low)


def _perform(batch: Sequence[_Job]) -> list[int]:
    """Perform all jobs, then sync each log once; return the results. Blocks."""
    has_space = {}
    for job in batch:
        match job:
            case _Effects():
                job.log.apply(job.effects)
            case _MakeSpace():
                has_space[job] = job.log.make_space(job.sizes)
            case _Trim():
                job.log.trim(job.base)
    for log in {job.log: None for job in batch}:
        log.flush()
    return [has_space[job] if isinstance(job, _MakeSpace) else job.log.durable_lsn for job in batch]


def _prepare(logs: Sequence[MemberLog]) -> None:
    for log in logs:
        log.prepare()


def _future() -> Future[int]:
    return asyncio.get_running_loop().create_future()


def _fail(job: _Job, error: BaseException) -> None:
    if job.done.done():
        return
    if isinstance(error, asyncio.CancelledError):
        job.done.cancel()
    else:
        job.done.set_exception(error)
