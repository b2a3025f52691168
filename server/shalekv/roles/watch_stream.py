"""`KV.Watch`: the watches of one stream, from their opening to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import structlog

from shalekv.engine.watching.feed import Position
from shalekv.engine.watching.seen_commit import SeenCommit
from shalekv.errors import InvalidRequest, ObjectNotFound, ShaleError, StoreError, WatchTooSlow
from shalekv.roles.watch import State, Watch
from shalekv.roles.watch_queue import EVENT_BYTES, WatchQueue
from shalekv.roles.watch_requests import watched_range
from shalekv.roles.watch_share import WatchShare
from shalekv.v1 import kv_pb2

Describe: TypeAlias = Callable[[BaseException], kv_pb2.OperationError]
LOOKS = 4  # at a stream in the time after which it is cut
LOOK_MS_MIN = 10

log = structlog.get_logger()


class WatchStream:
    """The watches of one stream."""

    def __init__(self, share: WatchShare, queue: WatchQueue, describe: Describe) -> None:
        """`describe` makes of an error what a client is told of it."""
        self._share = share
        self._queue = queue
        self._describe = describe
        self._watches: dict[int, Watch] = {}
        self._behind: dict[Watch, None] = {}  # they wait for their turn to read from the store
        self._fell_behind = asyncio.Event()
        self._leaving: list[Watch] = []  # their consumers have to let go of their leases
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_read = False  # no more requests will come
        self._refusal: ShaleError | None = None
        share.streams[self] = None

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._queue.held_bytes

    async def read(
        self, requests: AsyncIterator[kv_pb2.WatchRequest], tasks: asyncio.TaskGroup
    ) -> None:
        """Answer requests until there are no more, in tasks of their own where that takes time.

        A message that cannot be understood ends the stream: `replies` raises the error.
        """
        self._begin(tasks, self._let_read(tasks))
        self._begin(tasks, self._keep_time(tasks))
        try:
            async for request in requests:
                self._answer(request, tasks)
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
        self._refusal = error
        self._queue.drop()
        self._end_all(error)

    def close(self) -> None:
        """The client has gone."""
        self._queue.close()
        for task in self._tasks:
            task.cancel()
        for watch in [*self._watches.values()]:
            self._end(watch)
        self._share.streams.pop(self, None)

    async def leave(self) -> None:
        """Move the leases of consumers that were here on to what they have acknowledged."""
        for watch in self._leaving:
            if watch.consumer is not None:
                try:
                    await watch.consumer.leave()
                except ShaleError as error:
                    name = watch.consumer.name
                    log.warning("a lease is left where it was", consumer=name, error=str(error))

    # What a watch asks of its stream.

    def has_room(self, size_bytes: int) -> bool:
        """Whether something of that size may wait to be taken."""
        return self._queue.has_room(size_bytes)

    async def wait_for_room(self, size_bytes: int) -> None:
        """Wait until it may."""
        await self._queue.wait_for_room(size_bytes)

    def tell_commit(self, watch: Watch, commit: SeenCommit) -> None:
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

    def tell_progress(self, watch: Watch, position: Position) -> None:
        """Tell that all up to there was told."""
        if watch.next_seq > position.seq + 1:  # it begins in the future
            return
        reply = kv_pb2.WatchReply(watch_id=watch.watch_id, progress_seq=position.seq)
        self._queue.put_event(watch, reply)
        if position.wal_id is not None:
            self._note(watch, position.seq, position.wal_id)

    def lag(self, watch: Watch) -> None:
        """The watch has to read from the store, when there is room."""
        self._share.feed.leave(watch)
        if not watch.is_over:
            watch.state = State.BEHIND
            self._behind[watch] = None
            self._fell_behind.set()

    def close_watch(self, watch: Watch, error: ShaleError | None) -> None:
        """End the watch, and tell why; None: its client has asked for that."""
        if not watch.is_over:
            self._end(watch)
            self._tell_closed(watch.watch_id, error)
            self._end_if_idle()

    # Requests.

    def _answer(self, request: kv_pb2.WatchRequest, tasks: asyncio.TaskGroup) -> None:
        kind = request.WhichOneof("request")
        if self._refusal is not None:
            return
        if kind == "create":
            self._create(request.create, tasks)
        elif kind == "cancel":
            self._cancel(request.cancel.watch_id)
        elif kind == "ack":
            self._ack(request.ack)
        else:
            raise InvalidRequest("request", "neither create, cancel nor ack is set")

    def _create(self, create: kv_pb2.WatchCreate, tasks: asyncio.TaskGroup) -> None:
        watch_id = create.watch_id
        try:
            if watch_id in self._watches:
                raise InvalidRequest("create.watch_id", f"{watch_id} is open on this stream")
            keys = watched_range(create)
            self._share.check_count()
            consumer = self._share.claim(create.consumer) if create.consumer else None
        except ShaleError as error:
            known = self._watches.get(watch_id)
            if known is None:
                self._tell_closed(watch_id, error)
            else:  # of two with one id nobody could tell which is meant
                self.close_watch(known, error)
            return
        watch = Watch(
            self,
            watch_id,
            keys,
            wants_previous=create.previous_value,
            next_seq=create.start_seq,
            consumer=consumer,
        )
        self._watches[watch_id] = watch
        self._share.watch_count += 1
        if consumer is None:
            self._open(watch)
        else:
            self._begin(tasks, self._open_for_consumer(watch))

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
        position = self._share.feed.position
        watch.next_seq = watch.next_seq or position.seq + 1
        if watch.next_seq <= position.seq:
            self.lag(watch)
            return
        watch.begins()
        self._share.feed.join(watch)
        watch.state = State.FOLLOWING

    async def _open_for_consumer(self, watch: Watch) -> None:
        """First the lease, then what it keeps."""
        try:
            watch.next_seq = await self._share.begin_consumer(watch)
        except ShaleError as error:
            if isinstance(error, ObjectNotFound):
                error = await self._share.history.why_missing(error, watch.next_seq)
            self.close_watch(watch, error)
            return
        if not watch.is_over:
            self._open(watch)

    # What goes on beside.

    async def _let_read(self, tasks: asyncio.TaskGroup) -> None:
        """Let those that have fallen behind read together, and those that begin in the past."""
        while True:
            await self._fell_behind.wait()
            await self._queue.wait_for_half()
            self._fell_behind.clear()
            behind, self._behind = [*self._behind], {}
            behind = [watch for watch in behind if not watch.is_over]
            known = [watch for watch in behind if watch.first_wal_id is not None]
            unknown = [watch for watch in behind if watch.first_wal_id is None]
            first = min((w.first_wal_id for w in known if w.first_wal_id is not None), default=None)
            for group, wal_id in ((known, first), (unknown, None)):
                if group:
                    reading = self._share.catch_up.run(group, wal_id, self._queue.wait_for_half)
                    self._begin(tasks, reading)

    async def _keep_time(self, tasks: asyncio.TaskGroup) -> None:
        """Tell idle watches how far all was told; cut a stream that is stuck; renew leases."""
        settings, clock = self._share.settings, self._share.clock
        stalled_ms, progress_ms = settings.watch_stalled_ms, settings.watch_progress_ms
        look_ms = max(min(progress_ms / 2, stalled_ms / LOOKS), LOOK_MS_MIN)
        while True:
            await clock.sleep_ms(look_ms)
            if self._queue.stalled_ms() >= stalled_ms:
                self._cut()
            now_ms = clock.monotonic_ms()
            for watch in [*self._watches.values()]:
                is_idle = watch.state is State.FOLLOWING and now_ms - watch.told_ms >= progress_ms
                if is_idle and self._queue.has_room(EVENT_BYTES):
                    self.tell_progress(watch, self._share.feed.position)
                    watch.told_ms = now_ms
                if watch.consumer is not None and watch.has_begun and watch.consumer.is_due:
                    self._begin(tasks, self._renew(watch))

    async def _renew(self, watch: Watch) -> None:
        assert watch.consumer is not None
        try:
            await watch.consumer.renew()
        except StoreError as error:
            name = watch.consumer.name
            log.warning("a lease was not renewed", consumer=name, error=str(error))
        except ShaleError as error:  # it is gone, or this process may not edit any more
            self.close_watch(watch, error)

    def _cut(self) -> None:
        """The client has taken nothing for long: let go of what waits for it."""
        waited = self._queue.drop()
        for watch in [*self._watches.values()]:
            next_seq = waited.get(watch, watch.next_seq)
            stalled_ms = self._share.settings.watch_stalled_ms
            problem = f"nothing was taken from this stream for {stalled_ms} ms"
            message = f"{problem}. Open the watch again at {next_seq}, and take what it tells"
            self._share.cut_count += 1
            self.close_watch(watch, WatchTooSlow(message, next_seq=next_seq))

    def _note(self, watch: Watch, seq: int, wal_id: int) -> None:
        watch.told_ms = self._share.clock.monotonic_ms()
        if watch.consumer is not None:
            watch.consumer.note(seq, wal_id)

    def _begin(self, tasks: asyncio.TaskGroup, work: Coroutine[None, None, None]) -> None:
        if self._queue.is_closed:
            work.close()
            return
        task = tasks.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Endings.

    def _end(self, watch: Watch) -> None:
        watch.state = State.OVER
        self._share.feed.leave(watch)
        self._share.watch_count -= 1
        self._behind.pop(watch, None)
        del self._watches[watch.watch_id]
        if watch.consumer is not None:
            self._share.release(watch.consumer)
            self._leaving.append(watch)

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
