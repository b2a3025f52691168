"""`KV.Watch`: the watches of one stream, from their opening to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TypeAlias

import structlog

from shalekv.clock import Clock
from shalekv.errors import (
    InvalidRequest,
    ManifestConflict,
    ObjectNotFound,
    Overloaded,
    ShaleError,
    StoreError,
    WatchTooSlow,
)
from shalekv.protocol.entry import KeyRange
from shalekv.read.memory_budget import MemoryBudget
from shalekv.read.version import PinnedVersion
from shalekv.settings import WatchSettings
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.watch.catch_up import CatchUp
from shalekv.watch.change_event import ChangeEvent
from shalekv.watch.consumers import ConsumerLeases, WatchConsumer
from shalekv.watch.feed import CommitFeed, FeedPosition
from shalekv.watch.history import History
from shalekv.watch.queue import EVENT_BYTES, WatchQueue
from shalekv.watch.watch import Watch, WatchState

# --- watch_share
# What all watches of a process share: where commits come from, bounds, consumers, counts.


RETRY_AFTER_MS = 1_000

# Checks the request of a watch, and returns its range. Raises `InvalidRequest`.
WatchedRange: TypeAlias = Callable[[kv_pb2.WatchCreate], KeyRange]


class WatchShare:
    """The watches of one process."""

    def __init__(
        self,
        feed: CommitFeed,
        history: History,
        catch_up: CatchUp,
        leases: ConsumerLeases | None,
        settings: WatchSettings,
        clock: Clock,
        watched_range: WatchedRange,
    ) -> None:
        """Without `leases` no watch can have a consumer."""
        self.watched_range = watched_range
        self.feed = feed
        self.history = history
        self.catch_up = catch_up
        self.settings = settings
        self.clock = clock
        self.room = MemoryBudget(settings.watch_bytes_max)
        self.streams: dict[WatchStream, None] = {}
        self.watch_count = 0
        self.commits_told = 0
        self.cut_count = 0
        self._leases = leases
        self._consumers: set[str] = set()

    def check_count(self) -> None:
        """Raise `Overloaded` if no more watches may be opened."""
        if self.watch_count >= self.settings.watch_count_max:
            message = (
                f"{self.watch_count} watches are open, as many as watch_count_max allows. Close "
                "some, or ask another server"
            )
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)

    def claim(self, name: str) -> WatchConsumer:
        """The consumer of this name. Raises `InvalidRequest` when a watch has it."""
        if self._leases is None:
            raise InvalidRequest("create.consumer", "this server keeps no leases for consumers")
        if name in self._consumers:
            problem = f"another watch of this server is open for the consumer {name!r}"
            raise InvalidRequest("create.consumer", problem)
        consumer = WatchConsumer(self._leases, name, self.settings.consumer_lease_ttl_s, self.clock)
        self._consumers.add(name)
        return consumer

    def release(self, consumer: WatchConsumer) -> None:
        """Another watch may have its name."""
        self._consumers.discard(consumer.name)

    async def begin_consumer(self, watch: Watch) -> int:
        """Where a watch with a consumer begins, when its lease keeps what is from there on.

        Raises `WalCollected`, `WalUnprotected`, and what leases and history raise.
        """
        try:
            return await self._begin_consumer(watch)
        except ObjectNotFound as missing:
            raise await self.history.why_missing(missing, watch.next_seq) from None

    async def _begin_consumer(self, watch: Watch) -> int:
        consumer, leases = watch.consumer, self._leases
        assert consumer is not None
        assert leases is not None
        found = await leases.find(consumer.name)
        position = self.feed.position
        end_wal_id = 0 if position.wal_id is None else position.wal_id + 1
        start_seq, wal_id = watch.next_seq, position.next_wal_id
        if start_seq:
            if position.wal_id is not None and start_seq <= position.seq:
                wal_id = await self.history.locate(start_seq, position.wal_id)
        elif found is not None and found.wal_id_min is not None:
            wal_id = min(found.wal_id_min, position.next_wal_id)
            first_seq = await self.history.first_seq(range(wal_id, end_wal_id))
            start_seq = first_seq or position.seq + 1
        await consumer.hold(wal_id)
        return start_seq


# --- watch_upkeep
# What goes on beside the requests of a stream of watches: reading what they missed, and time.


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
        watch.state = WatchState.BEHIND
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
        if is_idle and watch.state is WatchState.FOLLOWING and self._queue.has_room(EVENT_BYTES):
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


# --- stream


Describe: TypeAlias = Callable[[BaseException], kv_pb2.OperationError]


class WatchStream:
    """The watches of one stream."""

    def __init__(self, share: WatchShare, queue: WatchQueue, describe: Describe) -> None:
        """`describe` makes of an error what a client is told of it."""
        self._share = share
        self._queue = queue
        self._describe = describe
        self._watches: dict[int, Watch] = {}
        self._upkeep = Upkeep(share, queue, self._watches, self.close_watch)
        self._leaving: dict[WatchConsumer, None] = {}  # they have to move their leases on
        self._is_read = False  # no more requests will come
        self._is_refused = False
        share.streams[self] = None

    def count(self, state: WatchState) -> int:
        """Watches in this state."""
        return sum(watch.state is state for watch in self._watches.values())

    async def read(
        self, requests: AsyncIterator[kv_pb2.WatchRequest], tasks: asyncio.TaskGroup
    ) -> None:
        """Answer requests until there are no more, in `tasks` where that takes time.

        A message that cannot be understood ends the stream: `replies` raises the error.
        """
        self._upkeep.run_in(tasks)
        try:
            async for request in requests:
                if not self._is_refused:
                    self._answer(request)
                await self._queue.wait_for_room(EVENT_BYTES)
        except ShaleError as error:
            self._end_all(error)
        self._is_read = True
        self._end_if_idle()

    def replies(self) -> AsyncIterator[bytes]:
        """What its client is told, as it is ready, until no watch is left and none can come."""
        return self._queue.replies()

    def refuse(self, error: ShaleError) -> None:
        """End all watches now; then the stream ends with `error`."""
        self._is_refused = True
        self._queue.drop()
        self._end_all(error)

    def close(self) -> None:
        """The client has gone."""
        self._queue.close()
        self._upkeep.close()
        for watch in [*self._watches.values()]:
            self._end(watch)
        self._share.streams.pop(self, None)

    async def leave(self) -> None:
        """Move the leases of consumers that were here on to what they have acknowledged."""
        for consumer in [*self._leaving]:
            await self._leave(consumer)

    async def _leave(self, consumer: WatchConsumer) -> None:
        try:
            await consumer.leave()
        except ShaleError as error:
            log.warning("a lease is left where it was", consumer=consumer.name, error=str(error))
        self._leaving.pop(consumer, None)

    # What a watch asks of its stream.

    def has_room(self, size_bytes: int) -> bool:
        """Whether something of that size may wait to be taken."""
        return self._queue.has_room(size_bytes)

    async def wait_for_room(self, size_bytes: int) -> None:
        """Wait until it may."""
        await self._queue.wait_for_room(size_bytes)

    def tell_commit(self, watch: Watch, commit: ChangeEvent) -> None:
        """Let a commit wait to be taken."""
        self._queue.put_commit(watch, commit)
        if not commit.more:
            self._share.commits_told += 1
        self._note(watch, commit.seq, commit.wal_id)

    def tell_opened(self, watch: Watch) -> None:
        """Tell where the watch begins."""
        reply = kv_pb2.WatchReply(watch_id=watch.watch_id, opened_at_seq=watch.next_seq)
        self._queue.put_event(watch, reply)
        watch.told_ms = self._share.clock.monotonic_ms()

    def tell_progress(self, watch: Watch, position: FeedPosition) -> None:
        """Tell that all up to there was told."""
        reply = kv_pb2.WatchReply(watch_id=watch.watch_id, progress_seq=position.seq)
        self._queue.put_event(watch, reply)
        self._note(watch, position.seq, position.wal_id)

    def lag(self, watch: Watch) -> None:
        """The watch has to read from the store, when there is room."""
        self._share.feed.leave(watch)
        if not watch.is_over:
            self._upkeep.lag(watch)

    def close_watch(self, watch: Watch, error: ShaleError | None) -> None:
        """End the watch, and tell why; None: its client has asked for that."""
        if not watch.is_over:
            self._end(watch)
            self._tell_closed(watch.watch_id, error)
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
        if known is not None:  # of two with one id nobody could tell which is meant
            problem = f"{watch_id} is open on this stream, and is closed now"
            self.close_watch(known, InvalidRequest("create.watch_id", problem))
            return
        try:
            watch = self._watch(create)
        except ShaleError as error:
            self._tell_closed(watch_id, error)
            self._end_if_idle()
            return
        self._watches[watch_id] = watch
        self._share.watch_count += 1
        if watch.consumer is None:
            self._open(watch)
        else:
            self._upkeep.begin(self._open_for_consumer(watch))

    def _watch(self, create: kv_pb2.WatchCreate) -> Watch:
        keys = self._share.watched_range(create)
        self._share.check_count()
        return Watch(
            self,
            create.watch_id,
            keys,
            wants_previous=create.previous_value,
            next_seq=create.start_seq,
            consumer=self._share.claim(create.consumer) if create.consumer else None,
        )

    def _cancel(self, watch_id: int) -> None:
        watch = self._watches.get(watch_id)
        if watch is None:
            error = InvalidRequest("cancel.watch_id", f"{watch_id} is not open on this stream")
            self._tell_closed(watch_id, error)
        else:
            watch.is_cancelled = True
            self.close_watch(watch, None)

    def _ack(self, ack: kv_pb2.WatchAck) -> None:
        watch = self._watches.get(ack.watch_id)
        if watch is None:
            return  # it was closed while the message was on its way
        if watch.consumer is None:
            problem = f"{ack.watch_id} was opened without a consumer"
            self.close_watch(watch, InvalidRequest("ack.watch_id", problem))
        else:
            watch.consumer.ack(ack.seq)

    def _open(self, watch: Watch) -> None:
        feed = self._share.feed
        watch.next_seq = watch.next_seq or feed.position.seq + 1
        if watch.next_seq <= feed.position.seq:
            self.lag(watch)
            return
        watch.begins()
        feed.join(watch)
        watch.state = WatchState.FOLLOWING

    async def _open_for_consumer(self, watch: Watch) -> None:
        """First the lease, then what it keeps."""
        try:
            watch.next_seq = await self._share.begin_consumer(watch)
        except ShaleError as error:
            self.close_watch(watch, error)
        if not watch.is_over:
            self._open(watch)

    # Endings.

    def _note(self, watch: Watch, seq: int, wal_id: int | None) -> None:
        watch.told_ms = self._share.clock.monotonic_ms()
        if watch.consumer is not None and wal_id is not None:
            watch.consumer.note(seq, wal_id)

    def _end(self, watch: Watch) -> None:
        watch.state = WatchState.OVER
        self._share.feed.leave(watch)
        self._share.watch_count -= 1
        del self._watches[watch.watch_id]
        if watch.consumer is not None:
            self._share.release(watch.consumer)
            self._leaving[watch.consumer] = None
            self._upkeep.begin(self._leave(watch.consumer))  # or at the end of the stream

    def _end_all(self, error: ShaleError) -> None:
        for watch in [*self._watches.values()]:
            self.close_watch(watch, error)
        self._queue.end(error)

    def _end_if_idle(self) -> None:
        if self._is_read and not self._watches:
            self._queue.end(None)

    def _tell_closed(self, watch_id: int, error: ShaleError | None) -> None:
        told = kv_pb2.OperationError() if error is None else self._describe(error)
        self._queue.put_event(None, kv_pb2.WatchReply(watch_id=watch_id, closed=told))


# --- watching
# `KV.Watch`, as any process answers it that shows a prefix of the log.


class Watches:
    """Implements `server.service.WatchService`."""

    def __init__(  # noqa: PLR0913 (all but the first are what it works with)
        self,
        feed: CommitFeed,
        history: History,
        settings: WatchSettings,
        clock: Clock,
        *,
        hold: Callable[[], PinnedVersion],
        header: Callable[[int, int | None], kv_pb2.ReplyHeader],
        now_ms: Callable[[], int],
        watched_range: WatchedRange,
        leases: ConsumerLeases | None = None,
    ) -> None:
        """`hold` is the tree that reads use now; `header` makes that of a reply; `now_ms` is
        logical time. Without `leases` no watch can have a consumer.
        """
        self._settings = settings
        self._clock = clock
        self._header = header
        self._now_ms = now_ms
        self._feed = feed
        catch_up = CatchUp(feed, history, hold, clock)
        self._share = WatchShare(feed, history, catch_up, leases, settings, clock, watched_range)

    @property
    def held_bytes(self) -> int:
        """What waits to be taken, of all streams."""
        return self._share.room.used_bytes

    def open(self, describe: Describe) -> WatchStream:
        """A new stream; `describe` makes of an error what a client is told of it."""
        queue = WatchQueue(
            self._share.room,
            self._settings.watch_stream_bytes_max,
            self._clock,
            header=self._header_now,
            now_ms=self._now_ms,
        )
        return WatchStream(self._share, queue, describe)

    def status(self) -> admin_pb2.WatchStatus:
        """What there is, and what was done."""
        share = self._share
        return admin_pb2.WatchStatus(
            watches=share.watch_count,
            streams=len(share.streams),
            buffered_bytes=share.room.used_bytes,
            buffered_bytes_max=self._settings.watch_stream_bytes_max,
            commits_told=share.commits_told,
            catching_up=sum(stream.count(WatchState.BEHIND) for stream in share.streams),
            cut=share.cut_count,
        )

    def _header_now(self) -> kv_pb2.ReplyHeader:
        position = self._feed.position
        return self._header(position.seq, position.wal_id)
