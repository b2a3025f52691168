"""What goes on beside the requests of a stream of watches: reading what they missed, and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping

import structlog

from shalekv.errors import ManifestConflict, ShaleError, StoreError, WatchTooSlow
from shalekv.roles.watch_share import WatchShare
from shalekv.watch.queue import EVENT_BYTES, WatchQueue
from shalekv.watch.watch import State, Watch

LOOKS = 4  # at a stream in the time after which it is cut
LOOK_MS_MIN = 10

log = structlog.get_logger()


class Upkeep:
    """The tasks of one stream."""

    def __init__(
        self,
        share: WatchShare,
        queue: WatchQueue,
        watches: Mapping[int, Watch],
        close_watch: Callable[[Watch, ShaleError | None], None],
    ) -> None:
        """`watches` are those that are open at any moment."""
        self._share = share
        self._queue = queue
        self._watches = watches
        self._close_watch = close_watch
        self._behind: dict[Watch, None] = {}  # they wait for their turn to read from the store
        self._fell_behind = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """Do all this in `tasks`, until `close`."""
        self._group = tasks
        self.begin(self._let_read())
        self.begin(self._keep_time())

    def begin(self, work: Coroutine[None, None, None]) -> None:
        """Do this, too. REQUIRES: `run_in` was called."""
        if self._group is None or self._queue.is_closed:
            work.close()
            return
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all of it."""
        for task in self._tasks:
            task.cancel()

    def lag(self, watch: Watch) -> None:
        """The watch has to read from the store, when there is room."""
        watch.state = State.BEHIND
        self._behind[watch] = None
        self._fell_behind.set()

    async def _let_read(self) -> None:
        """Let those that have fallen behind read together, and those that begin in the past."""
        while True:
            await self._fell_behind.wait()
            await self._queue.wait_for_half()
            self._fell_behind.clear()
            behind = [watch for watch in self._behind if not watch.is_over]
            self._behind.clear()
            fell = {w: w.first_wal_id for w in behind if w.first_wal_id is not None}
            began = [watch for watch in behind if watch not in fell]
            for group, first in (([*fell], min(fell.values(), default=None)), (began, None)):
                if group:
                    run = self._share.catch_up.run
                    self.begin(run(group, first, self._queue.wait_for_half))

    async def _keep_time(self) -> None:
        """Tell idle watches how far all was told; cut a stream that is stuck; renew leases."""
        settings = self._share.settings
        stalled_ms, progress_ms = settings.watch_stalled_ms, settings.watch_progress_ms
        look_ms = max(min(progress_ms / 2, stalled_ms / LOOKS), LOOK_MS_MIN)
        while True:
            await self._share.clock.sleep_ms(look_ms)
            if self._queue.stalled_ms() >= stalled_ms:
                self._cut()
            now_ms = self._share.clock.monotonic_ms()
            for watch in [*self._watches.values()]:
                self._look_after(watch, now_ms)

    def _look_after(self, watch: Watch, now_ms: float) -> None:
        is_idle = now_ms - watch.told_ms >= self._share.settings.watch_progress_ms
        if is_idle and watch.state is State.FOLLOWING and self._queue.has_room(EVENT_BYTES):
            watch.tell_progress(self._share.feed.position)
        if watch.consumer is not None and watch.has_begun and watch.consumer.is_due:
            self.begin(self._renew(watch))

    async def _renew(self, watch: Watch) -> None:
        assert watch.consumer is not None
        try:
            await watch.consumer.renew()
        except (StoreError, ManifestConflict) as error:  # again, later
            name = watch.consumer.name
            log.warning("a lease was not renewed", consumer=name, error=str(error))
        except ShaleError as error:  # it is gone, or this process may not edit any more
            self._close_watch(watch, error)

    def _cut(self) -> None:
        """The client has taken nothing for long: let go of what waits for it."""
        waited = self._queue.drop()
        problem = f"nothing was taken for {self._share.settings.watch_stalled_ms} ms"
        for watch in [*self._watches.values()]:
            next_seq = waited.get(watch, watch.next_seq)
            message = f"{problem}. Open the watch again at {next_seq}, and take what it tells"
            self._share.cut_count += 1
            self._close_watch(watch, WatchTooSlow(message, next_seq=next_seq))
