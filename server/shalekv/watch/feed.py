"""The commit feed: publishes each commit to the watches when it and all before it are durable.

Such commits are the *prefix* of the log; a published commit is never taken back. The engine calls
`CommitFeed.applied` for each WAL object that it adds to the prefix, in slot order; it may skip the
call while `is_idle`.

A watch that cannot accept a commit leaves the feed and reads the WAL (`watch.catch_up`), so a slow
client delays neither the engine nor other watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shalekv.read.version import ReadView
from shalekv.watch.change_event import AppliedObject, changes_bytes
from shalekv.watch.previous import ViewBefore
from shalekv.watch.subscriptions import Subscriptions, Watcher

KEPT_BYTES_MAX = 8 << 20  # reading takes milliseconds; if more is applied meanwhile, read again


class RecentCommits:
    """The objects that were applied after commit `seq`, for watches that are catching up.

    Without a pause between commits, a watch that reads the log would never reach its end: some
    commits come during each read. The feed keeps these, and publishes them at once when the watch
    has read everything before them.
    """

    def __init__(self, seq: int, *, wants_previous: bool) -> None:
        """Begin after commit `seq`. `wants_previous`: keep the view before each object as well."""
        self.seq = seq
        self.wants_previous = wants_previous
        self._kept: deque[tuple[AppliedObject, ReadView | None]] = deque()
        self._size_bytes = 0

    def add(self, obj: AppliedObject, before: ReadView | None) -> None:
        """Keep the next applied object. A load is in SSTs, so recording restarts after it."""
        size_bytes = changes_bytes(obj.points) + changes_bytes(obj.range_tombstones)
        if obj.load is not None or self._size_bytes + size_bytes > KEPT_BYTES_MAX:
            self.restart(obj.max_seq)
            return
        self._kept.append((obj, before if self.wants_previous else None))
        self._size_bytes += size_bytes

    def restart(self, seq: int) -> None:
        """Drop everything, and keep what comes after this commit."""
        self.seq = seq
        self._kept.clear()
        self._size_bytes = 0

    def after(self, seq: int) -> Iterator[tuple[AppliedObject, ReadView | None]]:
        """Yield the objects applied after this commit. REQUIRES: it is not before `self.seq`."""
        for obj, before in self._kept:
            if obj.max_seq > seq:
                yield obj, before


class FeedPosition(NamedTuple):
    """The last commit of the prefix, and the last WAL object."""

    seq: int  # of the last commit
    wal_id: int | None  # of the last WAL object, which may be a fence; None: there is none
    is_open: bool = False  # more commits may go into that object

    @property
    def next_wal_id(self) -> int:
        """The first slot that can hold the next commit."""
        if self.wal_id is None:
            return 0
        return self.wal_id if self.is_open else self.wal_id + 1


class CommitFeed:
    """Publishes the prefix of one engine to the watches that follow it."""

    def __init__(self, position: Callable[[], FeedPosition]) -> None:
        """`position` returns the current position of the prefix."""
        self._position = position
        self._subscriptions: Subscriptions[Watcher] = Subscriptions()
        self._recent: list[RecentCommits] = []

    @property
    def is_idle(self) -> bool:
        """Return whether nothing follows or records the feed, so that `applied` may be skipped."""
        return self._subscriptions.is_empty and not self._recent

    @property
    def wants_previous(self) -> bool:
        """Return whether `applied` needs the view before the object."""
        return self._subscriptions.wants_previous or any(
            each.wants_previous for each in self._recent
        )

    @property
    def position(self) -> FeedPosition:
        """The current position. A watcher that joins now receives every commit after it."""
        return self._position()

    @property
    def subscriptions(self) -> Subscriptions[Watcher]:
        """The watchers that follow the feed."""
        return self._subscriptions

    def join(self, watcher: Watcher) -> FeedPosition:
        """Publish every commit from now on to `watcher`; return the current position."""
        self._subscriptions.add(watcher)
        return self._position()

    def leave(self, watcher: Watcher) -> None:
        """Stop publishing to `watcher`, if it follows the feed."""
        self._subscriptions.remove(watcher)

    @contextmanager
    def record_recent(self, *, wants_previous: bool) -> Iterator[RecentCommits]:
        """Record what is applied from now on, until the context ends."""
        recent = RecentCommits(self._position().seq, wants_previous=wants_previous)
        self._recent.append(recent)
        try:
            yield recent
        finally:
            self._recent.remove(recent)

    def hand_over(self, watchers: Iterable[Watcher], recent: RecentCommits, seq: int) -> None:
        """Publish what was applied after commit `seq` to `watchers`, and let them join.

        A watcher that does not accept all of it has fallen behind, and has left the feed.
        REQUIRES: everything up to `seq` was published to them, and `recent` has what follows.
        """
        joined: Subscriptions[Watcher] = Subscriptions()
        for watcher in watchers:
            self._subscriptions.add(watcher)
            joined.add(watcher)
        for obj, before in recent.after(seq):
            prior = None if before is None else ViewBefore(before)
            for group, events in joined.events_of(obj, prior):
                for watcher in group:
                    if not all(watcher.accept(event) for event in events):
                        joined.remove(watcher)

    def applied(self, obj: AppliedObject, before: ReadView | None) -> None:
        """Publish a WAL object that has become part of the prefix.

        `before` is the view just before it, needed only if `wants_previous`. REQUIRES: called in
        slot order, exactly once for each object that is not empty, before any other task runs.
        """
        for recent in self._recent:
            recent.add(obj, before)
        if obj.load is not None:
            self._applied_load(obj)
            return
        prior = None if before is None else ViewBefore(before)
        for watchers, events in self._subscriptions.events_of(obj, prior):
            for watcher in watchers:
                for event in events:
                    if not watcher.accept(event):
                        break

    def _applied_load(self, obj: AppliedObject) -> None:
        """Make the watchers that overlap the load read the WAL from its slot on.

        The keys of a load are in SSTs, not in memory.
        """
        assert obj.load is not None
        for topic in self._subscriptions.topics_of_load(obj.load):
            for watcher in topic.all_watchers():
                watcher.fall_behind(obj.load.seq, obj.wal_id)

    def jumped(self, seq: int, wal_id: int) -> None:
        """Make all watchers read the WAL after commit `seq`, from slot `wal_id` on.

        Called when a replica has skipped objects of the log that the levels hold, because they may
        be deleted. A watch that needs one that is deleted fails with `WalCollected`.
        """
        for recent in self._recent:
            recent.restart(self._position().seq)
        for topic in self._subscriptions.topics():
            for watcher in topic.all_watchers():
                watcher.fall_behind(seq + 1, wal_id)
