"""The feed: tells watches of commits at the moment at which these become part of the prefix.

Whoever applies WAL objects calls `applied` for each, in slot order; it costs nothing while nobody
watches. What is told is never taken back: only what is durable without a gap before it comes here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shalekv.read.version import ReadView
from shalekv.watch.change_event import AppliedObject, changes_bytes
from shalekv.watch.previous import Before
from shalekv.watch.subscriptions import Subscriptions, Watcher

# --- lately
# What was applied lately: kept for watches that have read almost all that comes before it.
#
# Where commits never pause, who reads the log would be behind by a few for ever: those that came
# while the last ones were read. So the feed keeps them from some commit on, and tells them at
# once to whoever has read all up to there.


KEPT_BYTES_MAX = 8 << 20  # what is read takes milliseconds: more than that is read once more


class RecentCommits:
    """Everything that was applied after commit `seq`."""

    def __init__(self, seq: int, *, wants_previous: bool) -> None:
        """Nothing yet. `wants_previous`: the states before are needed."""
        self.seq = seq
        self.wants_previous = wants_previous
        self._kept: deque[tuple[AppliedObject, ReadView | None]] = deque()
        self._size_bytes = 0

    def add(self, obj: AppliedObject, before: ReadView | None) -> None:
        """The next that was applied; of a load, which has to be read, nothing is kept."""
        size_bytes = changes_bytes(obj.points) + changes_bytes(obj.range_tombstones)
        if obj.load is not None or self._size_bytes + size_bytes > KEPT_BYTES_MAX:
            self.begin_again(obj.max_seq)
            return
        self._kept.append((obj, before if self.wants_previous else None))
        self._size_bytes += size_bytes

    def begin_again(self, seq: int) -> None:
        """Keep only what comes after this commit."""
        self.seq = seq
        self._kept.clear()
        self._size_bytes = 0

    def after(self, seq: int) -> Iterator[tuple[AppliedObject, ReadView | None]]:
        """What was applied after this commit. REQUIRES: it is not before `self.seq`."""
        for obj, before in self._kept:
            if obj.max_seq > seq:
                yield obj, before


# --- feed


class FeedPosition(NamedTuple):
    """How far a server has come."""

    seq: int  # of the last commit
    wal_id: int | None  # of the last WAL object, which may be an empty one
    is_open: bool = False  # more commits may go into that object

    @property
    def next_wal_id(self) -> int:
        """The object that the next commit may stand in, or a later one."""
        if self.wal_id is None:
            return 0
        return self.wal_id if self.is_open else self.wal_id + 1


class CommitFeed:
    """Those who watch the prefix of one engine."""

    def __init__(self, position: Callable[[], FeedPosition]) -> None:
        """`position` is that of the prefix at this moment."""
        self._position = position
        self._audience: Subscriptions[Watcher] = Subscriptions()
        self._lately: list[RecentCommits] = []

    @property
    def is_idle(self) -> bool:
        """Whether nobody watches: then `applied` need not be called."""
        return self._audience.is_empty and not self._lately

    @property
    def wants_previous(self) -> bool:
        """Whether `applied` needs the state before."""
        return self._audience.wants_previous or any(each.wants_previous for each in self._lately)

    @property
    def position(self) -> FeedPosition:
        """How far the engine has come. Whoever joins now is told of all that comes after it."""
        return self._position()

    @property
    def audience(self) -> Subscriptions[Watcher]:
        """Those who watch."""
        return self._audience

    def join(self, watcher: Watcher) -> FeedPosition:
        """Tell `watcher` of every commit from now on; how far the engine has come."""
        self._audience.add(watcher)
        return self._position()

    def leave(self, watcher: Watcher) -> None:
        """Tell it nothing more, if it is here."""
        self._audience.remove(watcher)

    @contextmanager
    def lately(self, *, wants_previous: bool) -> Iterator[RecentCommits]:
        """What is applied from now on, as long as the context lasts."""
        lately = RecentCommits(self._position().seq, wants_previous=wants_previous)
        self._lately.append(lately)
        try:
            yield lately
        finally:
            self._lately.remove(lately)

    def hand_over(self, watchers: Iterable[Watcher], lately: RecentCommits, seq: int) -> None:
        """Tell what was applied after commit `seq`, and let those watch who have room for it.

        REQUIRES: all up to `seq` was told, and `lately` has what follows.
        """
        left: Subscriptions[Watcher] = Subscriptions()
        for watcher in watchers:
            self._audience.add(watcher)
            left.add(watcher)
        for obj, before in lately.after(seq):
            outside = None if before is None else Before(before)
            for told, commits in left.commits_of(obj, outside):
                for watcher in told:
                    if not all(watcher.tell(commit) for commit in commits):
                        left.remove(watcher)

    def applied(self, obj: AppliedObject, before: ReadView | None) -> None:
        """A WAL object has become part of the prefix.

        `before` is the state just before it, needed only if `wants_previous`. REQUIRES: called in
        slot order, exactly once for each object that is not empty, before any other task runs.
        """
        for lately in self._lately:
            lately.add(obj, before)
        if obj.load is not None:
            self._applied_load(obj)
            return
        outside = None if before is None else Before(before)
        for watchers, commits in self._audience.commits_of(obj, outside):
            for watcher in watchers:
                for commit in commits:
                    if not watcher.tell(commit):
                        break

    def _applied_load(self, obj: AppliedObject) -> None:
        """What a load holds has to be read: those whom it concerns read the WAL from there on."""
        assert obj.load is not None
        for topic in self._audience.topics_of_load(obj.load):
            for watcher in topic.everybody():
                watcher.fall_behind(obj.load.seq, obj.wal_id)

    def jumped(self, seq: int, wal_id: int) -> None:
        """Not all that came after commit `seq` was told, from slot `wal_id` on: it has to be read.

        A replica that was away for long goes on behind what the levels hold.
        """
        for lately in self._lately:
            lately.begin_again(self._position().seq)
        for topic in self._audience.topics():
            for watcher in topic.everybody():
                watcher.fall_behind(seq + 1, wal_id)
