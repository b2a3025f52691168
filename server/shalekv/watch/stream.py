"""`KV.Watch`: the streams of a process and the watches of each, from their opening to their end.

`Watches` opens a `WatchStream` for each RPC. A stream answers requests and queues replies; its
`StreamTasks` do the rest in the background. `WatchRegistry` is what all streams of a process share.

A slow client: when the queue of its stream is full, its watches leave the feed and read the WAL
whenever half of the queue is free. If the client takes no reply for `STALLED_MS`, its watches
end with `WatchTooSlow`, which has the commit to resume at.

Resuming: a client opens a new watch with `start_seq`, the commit after the last one that it has
processed. If the WAL objects from there on are deleted, the watch ends with `WalCollected`. A watch
with a consumer may leave `start_seq` out: the lease of the consumer keeps the WAL from the object
of its last acknowledged commit on. The watch begins there, so some commits may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import TypeAlias

import structlog

from shalekv.clock import Clock
from shalekv.errors import (
    InvalidRequest,
    ManifestConflict,
    Overloaded,
    ShaleError,
    StoreError,
    WatchTooSlow,
)
from shalekv.protocol.entry import KeyRange
from shalekv.read.memory_budget import MemoryBudget
from shalekv.read.version import PinnedVersion
from shalekv.settings import KIB, MIB, WatchSettings
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.watch.catch_up import CatchUp
from shalekv.watch.change_event import ChangeEvent
from shalekv.watch.consumers import ConsumerLeases, OpenConsumers, WatchConsumer
from shalekv.watch.feed import CommitFeed, FeedPosition
from shalekv.watch.history import History
from shalekv.watch.queue import EVENT_BYTES, WatchQueue
from shalekv.watch.watch import Watch, WatchState

RETRY_AFTER_MS = 1_000
# A stream of which nothing was taken for so long is cut: a message has at most 3.5 MiB, which takes
# as long at 0.5 Mbit/s.
STALLED_MS = 60_000
POLLS_PER_STALL = 4  # polls of a stream during the time after which it is cut
POLL_MS_MIN = 10
WATCHES_MAX = 100_000  # each takes about a kilobyte, and a check of each commit in its range
STREAMS_FULL = 4  # streams that can reach their limit at once
STREAM_BYTES_MIN = 64 * KIB
STREAM_BYTES_MAX = 4 * MIB  # a client that is further behind reads the WAL faster than a queue

# Checks the request of a watch, and returns its range. Raises `InvalidRequest`.
WatchedRange: TypeAlias = Callable[[kv_pb2.WatchCreate], KeyRange]
# Converts an error to the form in which a client receives it.
Describe: TypeAlias = Callable[[BaseException], kv_pb2.OperationError]
# Admits a watch, or raises. Is given what ends the watch with an error, and returns what is called
# when it has ended.
Admit: TypeAlias = Callable[[kv_pb2.WatchCreate, Callable[[ShaleError], None]], Callable[[], None]]

log = structlog.get_logger()


class WatchRegistry:
    """The state that all streams of one process share: feed, consumers, limits and counts."""

    def __init__(
        self,
        feed: CommitFeed,
        catch_up: CatchUp,
        consumers: OpenConsumers,
        settings: WatchSettings,
        clock: Clock,
        watched_range: WatchedRange,
    ) -> None:
        """Begin without watches."""
        self.watched_range = watched_range
        self.feed = feed
        self.catch_up = catch_up
        self.consumers = consumers
        self.settings = settings
        self.clock = clock
        self.budget = MemoryBudget(settings.watch_bytes_max)
        self.streams: dict[WatchStream, None] = {}
        self.watch_count = 0
        self.commits_published = 0
        self.cut_count = 0

    def check_count(self) -> None:
        """Raise `Overloaded` if no more watches may be opened."""
        if self.watch_count >= WATCHES_MAX:
            message = (
                f"{self.watch_count} watches are open, the most that a server has. Close "
                "some, or ask another server"
            )
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)


class StreamTasks:
    """The background tasks of one stream: catching up, progress, stalled clients, leases."""

    def __init__(
        self,
        registry: WatchRegistry,
        queue: WatchQueue,
        watches: Mapping[int, Watch],
        close_watch: Callable[[Watch, ShaleError | None], None],
    ) -> None:
        """`watches` is the live map of the open watches."""
        self._registry = registry
        self._queue = queue
        self._watches = watches
        self._close_watch = close_watch
        self._behind: dict[Watch, None] = {}  # waiting to read from the store
        self._fell_behind = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """Start the background tasks in `tasks`; they run until `close`."""
        self._group = tasks
        self.start(self._run_catch_up())
        self.start(self._poll())

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` as a task, unless the stream is closed. REQUIRES: `run_in` was called."""
        if self._group is None or self._queue.is_closed:
            work.close()
            return
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Cancel all tasks."""
        for task in self._running:
            task.cancel()

    def start_catch_up(self, watch: Watch) -> None:
        """Let the watch read from the store, when the queue has space."""
        watch.state = WatchState.BEHIND
        self._behind[watch] = None
        self._fell_behind.set()

    async def _run_catch_up(self) -> None:
        """Whenever half of the queue is free, start passes for the watches that are behind.

        Watches that fell behind know their slot and share one pass. Those that begin at an old
        commit have to find their slot, and share another one.
        """
        while True:
            await self._fell_behind.wait()
            await self._queue.wait_until_half_free()
            self._fell_behind.clear()
            behind = [watch for watch in self._behind if not watch.is_over]
            self._behind.clear()
            fell = {w: w.first_wal_id for w in behind if w.first_wal_id is not None}
            began = [watch for watch in behind if watch not in fell]
            for group, first in (([*fell], min(fell.values(), default=None)), (began, None)):
                if group:
                    run = self._registry.catch_up.run
                    self.start(run(group, first, self._queue.wait_until_half_free))

    async def _poll(self) -> None:
        """Report progress to idle watches, cut the stream if it is stalled, renew leases."""
        progress_ms = self._registry.settings.watch_progress_ms
        poll_ms = max(min(progress_ms / 2, STALLED_MS / POLLS_PER_STALL), POLL_MS_MIN)
        while True:
            await self._registry.clock.sleep_ms(poll_ms)
            if self._queue.stalled_ms() >= STALLED_MS:
                self._cut()
            now_ms = self._registry.clock.monotonic_ms()
            for watch in [*self._watches.values()]:
                self._poll_watch(watch, now_ms)

    def _poll_watch(self, watch: Watch, now_ms: float) -> None:
        is_idle = now_ms - watch.last_reply_ms >= self._registry.settings.watch_progress_ms
        if is_idle and watch.state is WatchState.FOLLOWING and self._queue.has_space(EVENT_BYTES):
            watch.report_progress(self._registry.feed.position)
        if watch.consumer is not None and watch.has_begun and watch.consumer.is_due:
            self.start(self._renew(watch))

    async def _renew(self, watch: Watch) -> None:
        assert watch.consumer is not None
        try:
            await watch.consumer.renew()
        except (StoreError, ManifestConflict) as error:  # retried at a later poll
            name = watch.consumer.name
            log.warning("a lease was not renewed", consumer=name, error=str(error))
        except ShaleError as error:
            # The lease is gone, or this process must not edit the manifest any more.
            self._close_watch(watch, error)

    def _cut(self) -> None:
        """End all watches with `WatchTooSlow`: the client has taken nothing for too long.

        Queued commits are dropped. The error of each watch has the commit to resume at.
        """
        dropped = self._queue.drop()
        problem = f"nothing was taken for {STALLED_MS} ms"
        for watch in [*self._watches.values()]:
            next_seq = dropped.get(watch, watch.next_seq)
            message = f"{problem}. Open the watch again at {next_seq}, and keep taking its replies"
            self._registry.cut_count += 1
            self._close_watch(watch, WatchTooSlow(message, next_seq=next_seq))


class WatchStream:
    """One stream of `KV.Watch`, and its watches."""

    def __init__(
        self,
        registry: WatchRegistry,
        queue: WatchQueue,
        describe: Describe,
        admit: Admit | None = None,
        *,
        principal: str = "",
    ) -> None:
        """`describe` converts an error to the form in which the client receives it.

        `admit` is asked before each watch; None: all are admitted. Its consumers belong to
        `principal`.
        """
        self._principal = principal
        self._registry = registry
        self._queue = queue
        self._describe = describe
        self._admit = admit
        self._watches: dict[int, Watch] = {}
        self._tasks = StreamTasks(registry, queue, self._watches, self.close_watch)
        self._leaving: dict[WatchConsumer, None] = {}  # their leases have to be moved on
        self._is_read = False  # no more requests will come
        self._is_refused = False
        registry.streams[self] = None

    def count(self, state: WatchState) -> int:
        """Return the number of watches in this state."""
        return sum(watch.state is state for watch in self._watches.values())

    async def read(
        self, requests: AsyncIterator[kv_pb2.WatchRequest], tasks: asyncio.TaskGroup
    ) -> None:
        """Answer requests until there are no more; what takes time runs in `tasks`.

        An invalid message ends the stream: `replies` raises the error.
        """
        self._tasks.run_in(tasks)
        try:
            async for request in requests:
                if not self._is_refused:
                    self._answer(request)
                await self._queue.wait_for_space(EVENT_BYTES)
        except ShaleError as error:
            self._end_all(error)
        self._is_read = True
        self._end_if_idle()

    def replies(self) -> AsyncIterator[bytes]:
        """Yield encoded replies, until no watch is left and no request can open one."""
        return self._queue.replies()

    def refuse(self, error: ShaleError) -> None:
        """Close all watches now, drop their commits, and end the stream with `error`.

        Called when this process stops serving.
        """
        self._is_refused = True
        self._queue.drop()
        self._end_all(error)

    def close(self) -> None:
        """End everything, since the client has gone."""
        self._queue.close()
        self._tasks.close()
        for watch in [*self._watches.values()]:
            self._end(watch)
        self._registry.streams.pop(self, None)

    async def leave(self) -> None:
        """Move the leases of consumers whose watches ended on to what they have acknowledged.

        Called after the stream has ended.
        """
        for consumer in [*self._leaving]:
            await self._leave(consumer)

    async def _leave(self, consumer: WatchConsumer) -> None:
        try:
            await consumer.leave()
        except ShaleError as error:
            log.warning("a lease is left where it was", consumer=consumer.name, error=str(error))
        self._leaving.pop(consumer, None)

    # `WatchOutput`, for the watches of the stream.

    def has_space(self, size_bytes: int) -> bool:
        """Return whether a reply of that size may be queued."""
        return self._queue.has_space(size_bytes)

    async def wait_for_space(self, size_bytes: int) -> None:
        """Wait until a reply of that size may be queued."""
        await self._queue.wait_for_space(size_bytes)

    def put_commit(self, watch: Watch, event: ChangeEvent) -> None:
        """Queue a commit."""
        self._queue.put_commit(watch, event)
        if not event.more:
            self._registry.commits_published += 1
        self._note(watch, event.seq, event.wal_id)

    def put_opened(self, watch: Watch) -> None:
        """Queue the reply that says where the watch begins."""
        reply = kv_pb2.WatchReply(watch_id=watch.watch_id, opened_at_seq=watch.next_seq)
        self._queue.put_event(watch, reply)
        watch.last_reply_ms = self._registry.clock.monotonic_ms()

    def put_progress(self, watch: Watch, position: FeedPosition) -> None:
        """Queue the reply that says that everything up to `position` was reported."""
        reply = kv_pb2.WatchReply(watch_id=watch.watch_id, progress_seq=position.seq)
        self._queue.put_event(watch, reply)
        self._note(watch, position.seq, position.wal_id)

    def start_catch_up(self, watch: Watch) -> None:
        """Take the watch out of the feed, and let it read from the store."""
        self._registry.feed.leave(watch)
        if not watch.is_over:
            self._tasks.start_catch_up(watch)

    def close_watch(self, watch: Watch, error: ShaleError | None) -> None:
        """End the watch, and report why; None: its client has asked for it."""
        if not watch.is_over:
            self._end(watch)
            self._put_closed(watch.watch_id, error)
            self._end_if_idle()

    # Requests.

    def _answer(self, request: kv_pb2.WatchRequest) -> None:
        kind = request.WhichOneof("request")
        if kind == "create":
            self._create(request.create)
        elif kind == "cancel":
            self._cancel(request.cancel.watch_id)
        elif kind == "ack":
            self._ack(request.ack)
        else:
            raise InvalidRequest("request", "neither create, cancel nor ack is set")

    def _create(self, create: kv_pb2.WatchCreate) -> None:
        watch_id = create.watch_id
        known = self._watches.get(watch_id)
        if known is not None:  # later requests with this id would be ambiguous
            problem = f"{watch_id} is open on this stream, and is closed now"
            self.close_watch(known, InvalidRequest("create.watch_id", problem))
            return
        try:
            watch = self._watch(create)
        except ShaleError as error:
            self._put_closed(watch_id, error)
            self._end_if_idle()
            return
        self._watches[watch_id] = watch
        self._registry.watch_count += 1
        if watch.consumer is None:
            self._open(watch)
        else:
            self._tasks.start(self._open_for_consumer(watch, watch.consumer))

    def _watch(self, create: kv_pb2.WatchCreate) -> Watch:
        leave = self._admit and self._admit(create, partial(self._withdraw, create.watch_id))
        try:
            watch = self._admitted(create)
        except ShaleError:
            if leave is not None:
                leave()
            raise
        watch.leave = leave
        return watch

    def _withdraw(self, watch_id: int, error: ShaleError) -> None:
        """Close a watch that its client may not have any more; its queued commits are dropped."""
        watch = self._watches[watch_id]
        watch.is_cancelled = True
        self.close_watch(watch, error)

    def _admitted(self, create: kv_pb2.WatchCreate) -> Watch:
        keys = self._registry.watched_range(create)
        self._registry.check_count()
        return Watch(
            self,
            create.watch_id,
            keys,
            wants_previous=create.previous_value,
            next_seq=create.start_seq,
            consumer=self._take_consumer(create.consumer),
        )

    def _take_consumer(self, name: str) -> WatchConsumer | None:
        return self._registry.consumers.take(name, self._principal) if name else None

    def _cancel(self, watch_id: int) -> None:
        watch = self._watches.get(watch_id)
        if watch is None:
            error = InvalidRequest("cancel.watch_id", f"{watch_id} is not open on this stream")
            self._put_closed(watch_id, error)
        else:
            watch.is_cancelled = True
            self.close_watch(watch, None)

    def _ack(self, ack: kv_pb2.WatchAck) -> None:
        watch = self._watches.get(ack.watch_id)
        if watch is None:
            return  # closed while the acknowledgement was on its way
        if watch.consumer is None:
            problem = f"{ack.watch_id} was opened without a consumer"
            self.close_watch(watch, InvalidRequest("ack.watch_id", problem))
        else:
            watch.consumer.ack(ack.seq)

    def _open(self, watch: Watch) -> None:
        feed = self._registry.feed
        watch.next_seq = watch.next_seq or feed.position.seq + 1
        if watch.next_seq <= feed.position.seq:
            self.start_catch_up(watch)
            return
        watch.report_opened()
        feed.join(watch)
        watch.state = WatchState.FOLLOWING

    async def _open_for_consumer(self, watch: Watch, consumer: WatchConsumer) -> None:
        """Secure the lease first, then open the watch at what the lease keeps."""
        try:
            watch.next_seq = await self._registry.consumers.begin(consumer, watch.next_seq)
        except ShaleError as error:
            self.close_watch(watch, error)
        if not watch.is_over:
            self._open(watch)

    # Endings.

    def _note(self, watch: Watch, seq: int, wal_id: int | None) -> None:
        watch.last_reply_ms = self._registry.clock.monotonic_ms()
        if watch.consumer is not None and wal_id is not None:
            watch.consumer.record(seq, wal_id)

    def _end(self, watch: Watch) -> None:
        watch.state = WatchState.OVER
        self._registry.feed.leave(watch)
        self._registry.watch_count -= 1
        del self._watches[watch.watch_id]
        if watch.leave is not None:
            watch.leave()
        if watch.consumer is not None:
            self._registry.consumers.release(watch.consumer)
            self._leaving[watch.consumer] = None
            self._tasks.start(self._leave(watch.consumer))  # or `leave`, at the end of the stream

    def _end_all(self, error: ShaleError) -> None:
        for watch in [*self._watches.values()]:
            self.close_watch(watch, error)
        self._queue.end(error)

    def _end_if_idle(self) -> None:
        if self._is_read and not self._watches:
            self._queue.end(None)

    def _put_closed(self, watch_id: int, error: ShaleError | None) -> None:
        status = kv_pb2.OperationError() if error is None else self._describe(error)
        self._queue.put_event(None, kv_pb2.WatchReply(watch_id=watch_id, closed=status))


class Watches:
    """`KV.Watch` for the engine of one process. Implements `server.service.WatchService`."""

    def __init__(  # noqa: PLR0913 (its collaborators)
        self,
        feed: CommitFeed,
        history: History,
        settings: WatchSettings,
        clock: Clock,
        *,
        current_version: Callable[[], PinnedVersion],
        header: Callable[[int, int | None], kv_pb2.ReplyHeader],
        now_ms: Callable[[], int],
        watched_range: WatchedRange,
        leases: ConsumerLeases | None = None,
    ) -> None:
        """`current_version` returns the levels that new reads use. `header` makes the header of a
        reply for a commit and a WAL object. `now_ms` returns logical time. Without `leases`, no
        watch can have a consumer.
        """
        self._settings = settings
        self._clock = clock
        self._header = header
        self._now_ms = now_ms
        self._feed = feed
        catch_up = CatchUp(feed, history, current_version, clock)
        consumers = OpenConsumers(leases, feed, history, clock, settings.consumer_lease_ttl_s)
        self._registry = WatchRegistry(feed, catch_up, consumers, settings, clock, watched_range)

    @property
    def held_bytes(self) -> int:
        """Bytes queued by all streams."""
        return self._registry.budget.used_bytes

    @property
    def _stream_bytes_max(self) -> int:
        """Bytes that one stream may queue."""
        share_bytes = self._settings.watch_bytes_max // STREAMS_FULL
        return max(STREAM_BYTES_MIN, min(share_bytes, STREAM_BYTES_MAX))

    def open(
        self, describe: Describe, admit: Admit | None = None, *, principal: str = ""
    ) -> WatchStream:
        """Open a stream, as `WatchStream` says."""
        queue = WatchQueue(
            self._registry.budget,
            self._stream_bytes_max,
            self._clock,
            header=self._header_now,
            now_ms=self._now_ms,
        )
        return WatchStream(self._registry, queue, describe, admit, principal=principal)

    def status(self) -> admin_pb2.WatchStatus:
        """Return the current status: counts, and bytes queued."""
        registry = self._registry
        return admin_pb2.WatchStatus(
            watches=registry.watch_count,
            streams=len(registry.streams),
            buffered_bytes=registry.budget.used_bytes,
            buffered_bytes_max=self._stream_bytes_max,
            commits_told=registry.commits_published,
            catching_up=sum(stream.count(WatchState.BEHIND) for stream in registry.streams),
            cut=registry.cut_count,
        )

    def _header_now(self) -> kv_pb2.ReplyHeader:
        position = self._feed.position
        return self._header(position.seq, position.wal_id)
