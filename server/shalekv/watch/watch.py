"""One watch: where it is, and what it was told."""

from __future__ import annotations

import enum
from typing import Protocol

from shalekv.errors import ShaleError
from shalekv.protocol.entry import KeyRange
from shalekv.watch.change_event import ChangeEvent
from shalekv.watch.consumers import WatchConsumer
from shalekv.watch.feed import FeedPosition


class WatchState(enum.Enum):
    """Who tells a watch what comes next."""

    OPENING = enum.auto()  # nobody yet
    FOLLOWING = enum.auto()  # the feed
    BEHIND = enum.auto()  # it reads the WAL, or waits for room to do so
    OVER = enum.auto()  # nobody any more


class Teller(Protocol):
    """What a watch needs of its stream."""

    def has_room(self, size_bytes: int) -> bool:
        """Whether something of that size may wait to be taken."""
        ...

    async def wait_for_room(self, size_bytes: int) -> None:
        """Wait until it may."""
        ...

    def tell_commit(self, watch: Watch, commit: ChangeEvent) -> None:
        """Let it wait to be taken."""
        ...

    def tell_opened(self, watch: Watch) -> None:
        """Tell where the watch begins."""
        ...

    def tell_progress(self, watch: Watch, position: FeedPosition) -> None:
        """Tell that all up to there was told."""
        ...

    def lag(self, watch: Watch) -> None:
        """The watch has to read from the store."""
        ...

    def close_watch(self, watch: Watch, error: ShaleError | None) -> None:
        """End the watch, and tell why."""
        ...


class Watch:
    """Implements `watch.catch_up.Follower` for one watch of a stream."""

    __slots__ = (
        "_stream",
        "consumer",
        "first_wal_id",
        "has_begun",
        "is_cancelled",
        "keys",
        "next_seq",
        "state",
        "told_ms",
        "wants_previous",
        "watch_id",
    )

    def __init__(
        self,
        stream: Teller,
        watch_id: int,
        keys: KeyRange,
        *,
        wants_previous: bool,
        next_seq: int,
        consumer: WatchConsumer | None,
    ) -> None:
        """`next_seq` is where it is to begin, 0 for the next commit."""
        self._stream = stream
        self.watch_id = watch_id
        self.keys = keys
        self.wants_previous = wants_previous
        self.next_seq = next_seq
        self.consumer = consumer
        self.state = WatchState.OPENING
        self.is_cancelled = False  # by its client, who is told nothing more
        self.has_begun = False  # and its client knows where
        self.first_wal_id: int | None = None  # where it has to read on, if it has fallen behind
        self.told_ms = 0.0  # when it was told something

    @property
    def is_over(self) -> bool:
        """Whether it is closed."""
        return self.state is WatchState.OVER

    def tell(self, commit: ChangeEvent) -> bool:
        """The next commit from the feed; False: there is no room, and it has left the feed."""
        if commit.seq < self.next_seq:
            return True
        if not self._stream.has_room(commit.size_bytes):
            self.fall_behind(commit.seq, commit.wal_id)
            return False
        self._put(commit)
        return True

    async def take(self, commit: ChangeEvent) -> None:
        """The next commit that was read, when there is room for it."""
        await self._stream.wait_for_room(commit.size_bytes)
        if not self.is_over:
            self._put(commit)

    def _put(self, commit: ChangeEvent) -> None:
        self._stream.tell_commit(self, commit)
        if not commit.more:
            self.next_seq = commit.seq + 1

    def fall_behind(self, seq: int, wal_id: int) -> None:
        """Read from there on what the feed would tell."""
        self.next_seq = max(self.next_seq, seq)
        self.first_wal_id = wal_id
        self._stream.lag(self)

    def begins(self) -> None:
        """Tell its client that it is open, and where it begins."""
        if not self.has_begun:
            self.has_begun = True
            self._stream.tell_opened(self)

    def caught_up(self, position: FeedPosition) -> None:
        """The feed tells it what comes next."""
        self.state = WatchState.FOLLOWING
        self.next_seq = max(self.next_seq, position.seq + 1)
        self.tell_progress(position)

    def tell_progress(self, position: FeedPosition) -> None:
        """All up to there was told, unless it begins in the future."""
        if self.next_seq <= position.seq + 1:
            self._stream.tell_progress(self, position)

    def fail(self, error: ShaleError) -> None:
        """It cannot be told what comes next."""
        self._stream.close_watch(self, error)
