"""Catching up: watches read the WAL from the store until they reach the feed, and then follow it.

A watch catches up if it begins at an old commit, or if its client took replies so slowly that it
had to leave the feed. Watches of one stream that catch up at the same time share a pass, which
reads each object once. When nothing is left to read, they join the feed. No other task runs between
this check and the joining, so no commit is missed and none is published twice.

The previous value of a key is that before a change. A pass finds it among the changes that it has
read, or else in the levels, once it has read everything after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing
from typing import Protocol

from shalekv.clock import Clock
from shalekv.errors import ObjectNotFound, ShaleError, WalCollected
from shalekv.protocol.entry import Entry
from shalekv.protocol.loads import CommittedLoad
from shalekv.read.version import PinnedVersion
from shalekv.watch.change_event import AppliedObject, ChangeEvent, Previous
from shalekv.watch.feed import CommitFeed, FeedPosition, RecentCommits
from shalekv.watch.history import READ_AT_ONCE, History
from shalekv.watch.previous import ReplayedState
from shalekv.watch.subscriptions import Subscriptions, Topic, Watcher

READING_PASSES_MAX = 4  # passes that hold WAL objects in memory at the same time
# A pass waits for space in its queue for so long while it holds objects. Then it drops them, to be
# read again when there is space, so that other passes can read.
PUBLISH_TIMEOUT_S = 1.0
# When an object is gone that one watch needs, the others may not need it: they try again, so often.
ATTEMPTS_MAX = 3
REPLAYED_BYTES_MAX = 32 << 20  # entries that one pass remembers as previous values


class CatchUpWatch(Watcher, Protocol):
    """A watch that can wait for space, and for commits that have to be read first."""

    @property
    def next_seq(self) -> int:
        """The first commit that is not published to it yet."""
        ...

    @property
    def is_over(self) -> bool:
        """Return whether it is closed: nothing more is published to it."""
        ...

    async def accept_when_free(self, event: ChangeEvent) -> None:
        """Wait for space in the queue, then accept the event."""
        ...

    def report_opened(self) -> None:
        """Report, once, that the watch is open: the commits from `next_seq` on can be read."""
        ...

    def caught_up(self, position: FeedPosition) -> None:
        """Record that everything up to `position` was published; the rest comes from the feed."""
        ...

    def fail(self, error: ShaleError) -> None:
        """Close the watch, since its next commit cannot be read."""
        ...


class CatchUp:
    """Reads from the WAL the commits that watches have missed."""

    def __init__(
        self,
        feed: CommitFeed,
        history: History,
        current_version: Callable[[], PinnedVersion | None],
        clock: Clock,
    ) -> None:
        """`current_version` returns a version whose SSTs are kept while it is referenced."""
        self._feed = feed
        self._history = history
        self._current_version = current_version
        self._clock = clock
        self._reading = asyncio.Semaphore(READING_PASSES_MAX)

    async def run(
        self,
        watches: Iterable[CatchUpWatch],
        first_wal_id: int | None,
        wait_for_space: Callable[[], Awaitable[None]],
    ) -> None:
        """Publish the WAL from `first_wal_id` on to the watches, until they follow the feed.

        None: from the slot that has the first of their next commits. `wait_for_space` is awaited
        before each read. Returns when each watch follows the feed, has fallen behind again, or has
        failed.
        """
        left, attempts = [*watches], 0
        while left:
            attempts += 1
            try:
                if first_wal_id is None:
                    first_wal_id, left = await self._located(left)
                for watch in left:
                    watch.report_opened()
                wal_pass = _WalPass(left, self._current_version(), self._history, self._clock)
                await self._read(wal_pass, wal_pass.start(first_wal_id), wait_for_space)
            except ShaleError as error:
                left = await self._failed(error, left, is_last=attempts == ATTEMPTS_MAX)
                first_wal_id = None
            else:
                return

    async def _located(self, watches: list[CatchUpWatch]) -> tuple[int, list[CatchUpWatch]]:
        """Find the slot to begin at; return it with the watches whose commits are all left.

        The others fail with `WalCollected`.
        """
        position = self._feed.position
        left = [each for each in watches if not each.is_over]
        while (start := min((each.next_seq for each in left), default=None)) is not None:
            if position.wal_id is None or start > position.seq:
                break
            try:
                return await self._history.locate(start, position.wal_id), left
            except WalCollected as error:
                for each in left:
                    if each.next_seq < error.oldest_seq:
                        seq = each.next_seq
                        each.fail(WalCollected(start_seq=seq, oldest_seq=error.oldest_seq))
                left = [each for each in left if not each.is_over]
        return position.next_wal_id, left

    async def _read(
        self, wal_pass: _WalPass, wal_id: int, wait_for_space: Callable[[], Awaitable[None]]
    ) -> None:
        published = FeedPosition(
            min((each.next_seq for each in wal_pass.open_watches()), default=0) - 1, None
        )
        with ExitStack() as recording:
            recent: RecentCommits | None = None  # applied while the last objects are read
            while watches := wal_pass.open_watches():
                wal_id = self._history.next_slot(wal_id)
                position = self._feed.position
                last_wal_id = -1 if position.wal_id is None else position.wal_id
                if wal_id > last_wal_id or published.seq >= position.seq:
                    for watch in watches:
                        self._feed.join(watch)
                        watch.caught_up(position)
                    return
                if recent is not None and published.seq >= recent.seq:
                    for watch in watches:
                        watch.caught_up(published)
                    self._feed.hand_over(watches, recent, published.seq)
                    return
                await wait_for_space()
                slots = range(wal_id, min(wal_id + READ_AT_ONCE, last_wal_id + 1))
                async with self._reading:
                    load, wal_id = await self._publish(wal_pass, slots)
                if load is not None:  # it is read in small parts, so without the semaphore
                    await wal_pass.publish_load(load)
                if wal_id > last_wal_id:
                    published = position if position.seq > published.seq else published
                    wal_id = position.next_wal_id  # the last one, if it was open: it may have grown
                    if recent is None:
                        record = self._feed.record_recent(wants_previous=wal_pass.wants_previous)
                        recent = recording.enter_context(record)

    async def _publish(self, wal_pass: _WalPass, slots: range) -> tuple[CommittedLoad | None, int]:
        """Publish the objects in these slots up to the first load.

        Return that load, if there is one, and the slot to go on with.
        """
        for obj in await self._history.read(slots):
            if obj.load is not None:
                return obj.load, obj.wal_id + 1
            try:
                async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                    await wal_pass.publish(obj)
            except TimeoutError:
                wal_pass.give_up(obj.wal_id)
                break
        return None, slots.stop

    async def _failed(
        self, error: ShaleError, watches: Sequence[CatchUpWatch], *, is_last: bool
    ) -> list[CatchUpWatch]:
        """Fail the watches with the reason why their pass has ended.

        Return those that may try again, since they do not need the objects that are gone.
        """
        next_seq = min(each.next_seq for each in watches)
        reason = await self._reason(error, next_seq)
        left: list[CatchUpWatch] = []
        for each in watches:
            if each.is_over:
                continue
            if not isinstance(reason, WalCollected):
                each.fail(reason)
            elif each.next_seq >= reason.oldest_seq and not is_last:
                left.append(each)
            else:
                each.fail(WalCollected(start_seq=each.next_seq, oldest_seq=reason.oldest_seq))
        return left

    async def _reason(self, error: ShaleError, next_seq: int) -> ShaleError:
        if isinstance(error, ObjectNotFound):
            try:
                return await self._history.why_missing(error, next_seq)
            except ShaleError as another:
                return another
        return error


class _WalPass:
    """One pass through the WAL for a group of watches."""

    def __init__(
        self,
        watches: Sequence[CatchUpWatch],
        pinned: PinnedVersion | None,
        history: History,
        clock: Clock,
    ) -> None:
        self._watches: Sequence[CatchUpWatch] = watches
        self._history = history
        self._clock = clock
        self._subscriptions: Subscriptions[CatchUpWatch] = Subscriptions()
        for watch in watches:
            if not watch.is_over:
                self._subscriptions.add(watch)
        self._pinned = pinned  # to the end of the pass: it keeps the SSTs of loads
        base = None if pinned is None else pinned.without_loads
        wal_id = None if base is None else base.version.wal_id
        self._levels_end = 0 if wal_id is None else wal_id + 1
        self._replayed = ReplayedState(base, size_bytes_max=REPLAYED_BYTES_MAX)
        self._uses_base = False

    def start(self, wal_id: int) -> int:
        """Return the slot to begin at, for commits from slot `wal_id` on.

        Previous values need all objects after the levels, even those before `wal_id`.
        """
        return min(wal_id, self._levels_end) if self._subscriptions.wants_previous else wal_id

    @property
    def wants_previous(self) -> bool:
        """Return whether any of the watches wants previous values."""
        return self._subscriptions.wants_previous

    def open_watches(self) -> list[CatchUpWatch]:
        """Return the watches that are not closed."""
        return [each for each in self._watches if not each.is_over]

    def give_up(self, wal_id: int) -> None:
        """End the pass; its watches read from this slot on in another one."""
        left, self._watches = self.open_watches(), ()
        for watch in left:
            watch.fall_behind(watch.next_seq, wal_id)

    async def publish(self, obj: AppliedObject) -> None:
        """Publish an object, to each watch the commits from its `next_seq` on.

        REQUIRES: it holds no load. If it is cancelled, the pass must publish nothing more.
        """
        self._use_levels_before(obj.wal_id)
        prior = self._replayed if self._subscriptions.wants_previous else None
        for watchers, events in [*self._subscriptions.events_of(obj, prior)]:
            for event in events:
                if event.previous is not None:
                    self._replayed.add(event.changes)
                await self._publish_event(watchers, event)
        await self._clock.sleep_ms(0)

    async def publish_load(self, load: CommittedLoad) -> None:
        """Publish the entries of a load, topic by topic."""
        self._use_levels_before(load.wal_id)
        for topic in self._subscriptions.topics_of_load(load):
            await self._publish_topic(load, topic)
        self._replayed.add_pending()

    def _use_levels_before(self, wal_id: int) -> None:
        """Take previous values from the levels if slot `wal_id`, the next one, comes after them."""
        if wal_id >= self._levels_end and not self._uses_base:
            self._replayed.use_base()
            self._uses_base = True

    async def _publish_event(self, watches: Iterable[CatchUpWatch], event: ChangeEvent) -> None:
        for watch in watches:
            if not watch.is_over and watch.next_seq <= event.seq:
                await watch.accept_when_free(event)

    async def _publish_topic(self, load: CommittedLoad, topic: Topic[CatchUpWatch]) -> None:
        watches = topic.all_watchers()
        if not topic.watchers_with_previous and not any(w.next_seq <= load.seq for w in watches):
            return
        try:
            await self._publish_parts(load, topic)
        except ObjectNotFound:
            for each in watches:
                if not each.is_over and each.next_seq <= load.seq:
                    seq = each.next_seq
                    each.fail(WalCollected(start_seq=seq, oldest_seq=load.seq + 1))

    async def _publish_parts(self, load: CommittedLoad, topic: Topic[CatchUpWatch]) -> None:
        pending: Sequence[Entry] = ()
        parts = self._history.load_parts(load, topic.keys)
        async with aclosing(parts):
            async for entries in parts:
                if pending:
                    await self._publish_part(load, topic, pending, more=True)
                pending = entries
        if pending:
            await self._publish_part(load, topic, pending, more=False)

    async def _publish_part(
        self,
        load: CommittedLoad,
        topic: Topic[CatchUpWatch],
        entries: Sequence[Entry],
        *,
        more: bool,
    ) -> None:
        if topic.watchers:
            event = ChangeEvent(load.seq, load.wal_id, entries, more=more)
            await self._publish_event((*topic.watchers,), event)
        if topic.watchers_with_previous:
            replayed = self._replayed
            previous: list[Previous] = [replayed.previous(entry.key) for entry in entries]
            event = ChangeEvent(
                load.seq, load.wal_id, entries, previous, replayed.pinned, more=more
            )
            await self._publish_event((*topic.watchers_with_previous,), event)
            replayed.add_later(entries)
