"""The engine of a writer: its parts wired together, and what they do as one.

Nothing here knows requests or transports; embedded in a process it is a database without a
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.clock import Clock
from shalekv.core.entry import Entry
from shalekv.core.flush import FlushPolicy
from shalekv.engine.admission import Admission
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.idempotency import Idempotency
from shalekv.engine.logical_time import LogicalTime
from shalekv.engine.memtable import Memtable, View
from shalekv.engine.newest_state import NewestState
from shalekv.engine.overlay import Overlay
from shalekv.engine.ownership import Ownership
from shalekv.engine.prefix import Prefix
from shalekv.engine.wal import WalSlots
from shalekv.errors import Stopping
from shalekv.manifest.fenced import FencedManifest
from shalekv.settings import LimitSettings, WriterSettings


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A log that is fenced and replayed: what a writer starts from."""

    manifest: FencedManifest
    slots: WalSlots
    memtable: Memtable
    time: LogicalTime
    last_wal_id: int
    last_seq: int
    first_seq: int  # that the writer may issue
    objects_replayed: int
    records: Sequence[Entry] = ()  # of idempotency keys, oldest first


class WriterEngine:
    """Writes, reads and the tasks behind them, of one opening."""

    def __init__(
        self,
        opened: OpenedLog,
        settings: WriterSettings,
        clock: Clock,
        *,
        limits: LimitSettings | None = None,
    ) -> None:
        """REQUIRES: `settings.flush_interval_ms` is set."""
        self._clock = clock
        self.manifest = opened.manifest
        self.time = opened.time
        self.memtable = opened.memtable
        self.objects_replayed = opened.objects_replayed
        self.policy = FlushPolicy(
            max_parallel_writes=settings.max_parallel_writes,
            interval_ms=settings.flush_interval_ms or 0,
            flush_bytes=settings.flush_bytes,
        )
        self.idempotency = Idempotency(
            window_ms=settings.idempotency_window_s * 1000, now_ms=self.time.now_ms
        )
        self.idempotency.land(opened.records)
        self._compare_count_max = (limits or LimitSettings()).compare_count_max
        self.admission = Admission(settings, memtable_bytes=lambda: self.memory_bytes)
        self.prefix = Prefix(self.memtable, seq=opened.last_seq, wal_id=opened.last_wal_id)
        self.ownership = Ownership(opened.manifest, poll_ms=settings.fence_poll_ms)
        self.log = GroupCommit(
            slots=opened.slots,
            memtable=self.memtable,
            admission=self.admission,
            prefix=self.prefix,
            policy=self.policy,
            state=self._newest_state,
            clock=clock,
            next_seq=opened.first_seq,
        )

    @property
    def memory_bytes(self) -> int:
        """What is durable and not compacted, as accounted: entries and idempotency records."""
        return self.memtable.size_bytes + self.idempotency.size_bytes

    def check_serving(self) -> None:
        """Raise when the log was stopped by an error; a graceful close still answers reads."""
        stopped_by = self.log.stopped_by
        if stopped_by is not None and not self.log.is_closing:
            raise stopped_by.with_traceback(None)  # or it would grow with each call

    def committed(self, key: bytes) -> Entry | None:
        """The newest durable version of `key`."""
        return self.memtable.get(key)

    def newest(self, key: bytes) -> Entry | None:
        """The newest version of `key`, durable or not."""
        return self.log.overlay.get(key)

    async def committed_view(self) -> View:
        """The durable prefix, once it covers all that was acknowledged before this call."""
        await self.prefix.cover(self.prefix.landed_seq)
        return self.memtable.view(self.prefix.seq, self.prefix.wal_id)

    async def newest_view(self) -> View:
        """Everything that is in memory at this moment, durable or not."""
        view = self.memtable.view(self.log.next_seq - 1, self.prefix.wal_id)
        landed_ahead = [group.run for group in self.prefix.landed_ahead()]
        not_durable = await self.log.overlay.runs(self._clock, max_seq=view.seq)  # as it is now
        return view.below([*landed_ahead, *not_durable])

    def _newest_state(self, overlay: Overlay) -> NewestState:
        """What a transaction meets that comes after everything in the overlay."""
        view = self.memtable.view(self.prefix.seq, self.prefix.wal_id)
        durable = view.below(group.run for group in self.prefix.landed_ahead())
        return NewestState(overlay, durable, self.time.now_ms(), self._compare_count_max)

    def close(self) -> None:
        """Accept no more writes; `run` returns when all that were accepted are durable."""
        self.log.close()

    async def run(self, *, stop_grace_ms: float) -> None:
        """Run until all is durable after `close`, or raise what stopped the log.

        Uploads in flight at that moment get `stop_grace_ms` to find out what became of them; then
        their writes end as unknown, and the log was stopped by that.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                flusher = tasks.create_task(self.log.run(), name="group commit")
                others = [
                    tasks.create_task(self._watch_owner(), name="watch for another writer"),
                    tasks.create_task(self.memtable.merge_when_due(self._clock), name="merge runs"),
                    tasks.create_task(
                        self._bound_end(flusher, stop_grace_ms), name="bound the end"
                    ),
                ]
                await asyncio.wait([flusher])
                for task in others:
                    task.cancel()
        finally:  # a task that is cancelled before its first step has no chance to do this itself
            self.log.end()
            self.ownership.end(Stopping("this writer has stopped"))
        if not self.log.is_closing and self.log.stopped_by is not None:
            raise self.log.stopped_by

    async def _watch_owner(self) -> None:
        self.log.stop(await self.ownership.run())

    async def _bound_end(self, flusher: asyncio.Task[None], grace_ms: float) -> None:
        await self.log.ended.wait()
        await self._clock.sleep_ms(grace_ms)
        flusher.cancel()
