"""One watch of a stream: its state, and the position up to which it has reported commits.

    OPENING ---> FOLLOWING (commits come from the feed)
       |           |  ^
       |   no space|  | caught up
       v           v  |
      BEHIND (commits are read from the WAL, while the queue has space)

Each state may change to OVER: the client cancels, the client takes nothing for too long, a commit
cannot be read any more, or the process stops serving.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from shalekv.errors import ShaleError
from shalekv.protocol.entry import KeyRange
from shalekv.watch.change_event import ChangeEvent
from shalekv.watch.consumers import WatchConsumer
from shalekv.watch.feed import FeedPosition


class WatchState(enum.Enum):
    """The source of the next commits of a watch."""

    OPENING = enum.auto()  # none yet
    FOLLOWING = enum.auto()  # the feed
    BEHIND = enum.auto()  # the WAL in the store, read when its queue has space
    OVER = enum.auto()  # none any more


class WatchOutput(Protocol):
    """The stream of a watch, as the watch uses it."""

    def has_space(self, size_bytes: int) -> bool:
        """Return whether a reply of that size may be queued."""
        ...

    async def wait_for_space(self, size_bytes: int) -> None:
        """Wait until a reply of that size may be queued."""
        ...

    def put_commit(self, watch: Watch, event: ChangeEvent) -> None:
        """Queue a commit."""
        ...

    def put_opened(self, watch: Watch) -> None:
        """Queue the reply that says where the watch begins."""
        ...

    def put_progress(self, watch: Watch, position: FeedPosition) -> None:
        """Queue the reply that says that everything up to `position` was reported."""
        ...

    def start_catch_up(self, watch: Watch) -> None:
        """Let the watch read from the store."""
        ...

    def close_watch(self, watch: Watch, error: ShaleError | None) -> None:
        """End the watch, and report why."""
        ...


class Watch:
    """Implements `watch.catch_up.CatchUpWatch` for one watch of a stream."""

    __slots__ = (
        "_stream",
        "consumer",
        "first_wal_id",
        "has_begun",
        "is_cancelled",
        "keys",
        "last_reply_ms",
        "leave",
        "next_seq",
        "state",
        "wants_previous",
        "watch_id",
    )

    def __init__(
        self,
        stream: WatchOutput,
        watch_id: int,
        keys: KeyRange,
        *,
        wants_previous: bool,
        next_seq: int,
        consumer: WatchConsumer | None,
    ) -> None:
        """`next_seq` is the first commit to report, 0 for the next one."""
        self._stream = stream
        self.watch_id = watch_id
        self.keys = keys
        self.wants_previous = wants_previous
        self.next_seq = next_seq
        self.consumer = consumer
        self.state = WatchState.OPENING
        self.is_cancelled = False  # by its client: its queued commits are not sent
        self.has_begun = False  # whether the reply with its first commit was queued
        self.first_wal_id: int | None = None  # where to read on, if it has fallen behind
        self.last_reply_ms = 0.0  # when its last reply was queued
        self.leave: Callable[[], None] | None = None  # called when it is over

    @property
    def is_over(self) -> bool:
        """Return whether it is closed."""
        return self.state is WatchState.OVER

    def accept(self, event: ChangeEvent) -> bool:
        """Queue the next commit from the feed.

        Return False if there is no space: then the watch has left the feed, and reads the WAL.
        """
        if event.seq < self.next_seq:
            return True
        if not self._stream.has_space(event.size_bytes):
            self.fall_behind(event.seq, event.wal_id)
            return False
        self._put(event)
        return True

    async def accept_when_free(self, event: ChangeEvent) -> None:
        """Queue the next commit that was read from the WAL, when there is space for it."""
        await self._stream.wait_for_space(event.size_bytes)
        if not self.is_over:
            self._put(event)

    def _put(self, event: ChangeEvent) -> None:
        self._stream.put_commit(self, event)
        if not event.more:
            self.next_seq = event.seq + 1

    def fall_behind(self, seq: int, wal_id: int) -> None:
        """Leave the feed, and read the commits from `seq` on, in slots from `wal_id` on."""
        self.next_seq = max(self.next_seq, seq)
        self.first_wal_id = wal_id
        self._stream.start_catch_up(self)

    def report_opened(self) -> None:
        """Report to the client, once, that the watch is open and where it begins."""
        if not self.has_begun:
            self.has_begun = True
            self._stream.put_opened(self)

    def caught_up(self, position: FeedPosition) -> None:
        """Follow the feed from now on: everything up to `position` was published."""
        self.state = WatchState.FOLLOWING
        self.next_seq = max(self.next_seq, position.seq + 1)
        self.report_progress(position)

    def report_progress(self, position: FeedPosition) -> None:
        """Report that everything up to `position` was published, unless the watch begins later."""
        if self.next_seq <= position.seq + 1:
            self._stream.put_progress(self, position)

    def fail(self, error: ShaleError) -> None:
        """Close the watch, since its next commit cannot be read."""
        self._stream.close_watch(self, error)
