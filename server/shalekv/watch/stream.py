"""`KV.Watch`: the watches of one stream, from their opening to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import structlog

from shalekv.errors import InvalidRequest, ShaleError
from shalekv.roles.watch_consumer import WatchConsumer
from shalekv.roles.watch_requests import watched_range
from shalekv.roles.watch_share import WatchShare
from shalekv.roles.watch_upkeep import Upkeep
from shalekv.v1 import kv_pb2
from shalekv.watch.change_event import SeenCommit
from shalekv.watch.feed import Position
from shalekv.watch.queue import EVENT_BYTES, WatchQueue
from shalekv.watch.watch import State, Watch

Describe: TypeAlias = Callable[[BaseException], kv_pb2.OperationError]

log = structlog.get_logger()


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

    def count(self, state: State) -> int:
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
        keys = watched_range(create)
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
        watch.state = State.FOLLOWING

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
        watch.state = State.OVER
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
