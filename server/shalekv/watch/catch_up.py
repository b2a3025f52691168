"""Catching up: watches read the WAL from the store until they meet the feed, and go on there.

Those of one stream that have to read at the same time read together, each object once. What is
behind them is the feed's as soon as nothing is left to read: no other task runs between that look
and their joining, so nothing is missed and nothing is told twice.
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
from shalekv.watch.previous import Met
from shalekv.watch.subscriptions import Subscriptions, Topic, Watcher

TURNS = 4  # passes that have WAL objects in memory at the same time
# For so long a pass waits for room to tell what it has in memory; then it reads it once more when
# there is room: others have their turn.
PATIENCE_S = 1.0
# Where one needs what is gone, others may not: so often they begin again.
PASSES_MAX = 3
MET_BYTES_MAX = 32 << 20  # of values that one pass remembers to tell them as values before


class WaitingWatch(Watcher, Protocol):
    """A watch that can wait for room, and for what has to be read first."""

    @property
    def next_seq(self) -> int:
        """The first commit that it was not told. Less than that is not told again."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it is closed, and told nothing more."""
        ...

    async def take(self, commit: ChangeEvent) -> None:
        """The same as `tell`, when there is room for it."""
        ...

    def begins(self) -> None:
        """All commits from `next_seq` on are there to be read."""
        ...

    def caught_up(self, position: FeedPosition) -> None:
        """It was told everything up to there, and is told by the feed from now on."""
        ...

    def fail(self, error: ShaleError) -> None:
        """It cannot be told what comes next."""
        ...


class CatchUp:
    """Lets watches read what they have missed."""

    def __init__(
        self,
        feed: CommitFeed,
        history: History,
        hold: Callable[[], PinnedVersion | None],
        clock: Clock,
    ) -> None:
        """`hold` is the tree that reads use now: what it needs is not deleted while it is held."""
        self._feed = feed
        self._history = history
        self._hold = hold
        self._clock = clock
        self._turns = asyncio.Semaphore(TURNS)

    async def run(
        self,
        followers: Iterable[WaitingWatch],
        first_wal_id: int | None,
        has_room: Callable[[], Awaitable[None]],
    ) -> None:
        """Tell all of them what stands in the WAL from `first_wal_id` on, until the feed does.

        None: from where the first of them begins. `has_room` is waited for before more is read.
        Returns when the feed has them, or each has been told why not.
        """
        left, passes = [*followers], 0
        while left:
            passes += 1
            try:
                if first_wal_id is None:
                    first_wal_id, left = await self._located(left)
                for follower in left:
                    follower.begins()
                reading = _WalPass(left, self._hold(), self._history, self._clock)
                await self._read(reading, reading.first(first_wal_id), has_room)
            except ShaleError as error:
                left = await self._failed(error, left, is_last=passes == PASSES_MAX)
                first_wal_id = None
            else:
                return

    async def _located(self, followers: list[WaitingWatch]) -> tuple[int, list[WaitingWatch]]:
        """Where those begin that can."""
        position = self._feed.position
        left = [each for each in followers if not each.is_over]
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
        self, reading: _WalPass, wal_id: int, has_room: Callable[[], Awaitable[None]]
    ) -> None:
        told = FeedPosition(
            min((each.next_seq for each in reading.followers()), default=0) - 1, None
        )
        with ExitStack() as kept:
            lately: RecentCommits | None = None  # what comes while the last is read
            while followers := reading.followers():
                wal_id = self._history.next_slot(wal_id)
                position = self._feed.position
                last_wal_id = -1 if position.wal_id is None else position.wal_id
                if wal_id > last_wal_id or told.seq >= position.seq:
                    for follower in followers:
                        self._feed.join(follower)
                        follower.caught_up(position)
                    return
                if lately is not None and told.seq >= lately.seq:
                    for follower in followers:
                        follower.caught_up(told)
                    self._feed.hand_over(followers, lately, told.seq)
                    return
                await has_room()
                slots = range(wal_id, min(wal_id + READ_AT_ONCE, last_wal_id + 1))
                async with self._turns:
                    load, wal_id = await self._tell(reading, slots)
                if load is not None:  # which is read in small parts
                    await reading.tell_load(load)
                if wal_id > last_wal_id:
                    told = position if position.seq > told.seq else told
                    wal_id = position.next_wal_id  # the last one, if it was open: it may have grown
                    if lately is None:
                        keeping = self._feed.lately(wants_previous=reading.wants_previous)
                        lately = kept.enter_context(keeping)

    async def _tell(self, reading: _WalPass, slots: range) -> tuple[CommittedLoad | None, int]:
        """Tell what stands in these slots up to the first load; that load, and what comes next."""
        for obj in await self._history.read(slots):
            if obj.load is not None:
                return obj.load, obj.wal_id + 1
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await reading.tell(obj)
            except TimeoutError:
                reading.give_up(obj.wal_id)
                break
        return None, slots.stop

    async def _failed(
        self, error: ShaleError, followers: Sequence[WaitingWatch], *, is_last: bool
    ) -> list[WaitingWatch]:
        """Tell why a pass has ended; those are left that do not need what is gone."""
        next_seq = min(each.next_seq for each in followers)
        reason = await self._reason(error, next_seq)
        left: list[WaitingWatch] = []
        for each in followers:
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
    """One pass through the WAL for some watches."""

    def __init__(
        self,
        followers: Sequence[WaitingWatch],
        held: PinnedVersion | None,
        history: History,
        clock: Clock,
    ) -> None:
        self._followers: Sequence[WaitingWatch] = followers
        self._history = history
        self._clock = clock
        self._audience: Subscriptions[WaitingWatch] = Subscriptions()
        for follower in followers:
            if not follower.is_over:
                self._audience.add(follower)
        self._held = held  # to the end: the files of loads are kept with it
        base = None if held is None else held.base
        wal_id = None if base is None else base.tree.wal_id
        self._levels_end = 0 if wal_id is None else wal_id + 1
        self._met = Met(base, size_bytes_max=MET_BYTES_MAX)
        self._rests_on_base = False

    def first(self, wal_id: int) -> int:
        """Where to begin for what begins at `wal_id`: for values before, behind the levels."""
        return min(wal_id, self._levels_end) if self._audience.wants_previous else wal_id

    @property
    def wants_previous(self) -> bool:
        """Whether any of them wants the values before."""
        return self._audience.wants_previous

    def followers(self) -> list[WaitingWatch]:
        """Those that are left."""
        return [each for each in self._followers if not each.is_over]

    def give_up(self, wal_id: int) -> None:
        """Let them read what stands from this slot on in another pass."""
        left, self._followers = self.followers(), ()
        for follower in left:
            follower.fall_behind(follower.next_seq, wal_id)

    async def tell(self, obj: AppliedObject) -> None:
        """Tell what an object holds, to each watch what it was not told before.

        REQUIRES: it holds no load. May be cancelled, but nothing can be told then any more.
        """
        self._pass_levels(obj.wal_id)
        met = self._met if self._audience.wants_previous else None
        told = [*self._audience.commits_of(obj, met)]
        for watchers, commits in told:
            for commit in commits:
                if commit.previous is not None:
                    self._met.add(commit.changes)
                await self._tell_commit(watchers, commit)
        await self._clock.sleep_ms(0)

    async def tell_load(self, load: CommittedLoad) -> None:
        """Tell what a load holds, range by range."""
        self._pass_levels(load.wal_id)
        for topic in self._audience.topics_of_load(load):
            await self._tell_load(load, topic)
        self._met.land()

    def _pass_levels(self, wal_id: int) -> None:
        if wal_id >= self._levels_end and not self._rests_on_base:
            self._met.rest_on_base()
            self._rests_on_base = True

    async def _tell_commit(self, watchers: Iterable[WaitingWatch], commit: ChangeEvent) -> None:
        for follower in watchers:
            if not follower.is_over and follower.next_seq <= commit.seq:
                await follower.take(commit)

    async def _tell_load(self, load: CommittedLoad, topic: Topic[WaitingWatch]) -> None:
        followers = topic.everybody()
        if not topic.asking and not any(each.next_seq <= load.seq for each in followers):
            return
        try:
            await self._tell_parts(load, topic)
        except ObjectNotFound:
            for each in followers:
                if not each.is_over and each.next_seq <= load.seq:
                    seq = each.next_seq
                    each.fail(WalCollected(start_seq=seq, oldest_seq=load.seq + 1))

    async def _tell_parts(self, load: CommittedLoad, topic: Topic[WaitingWatch]) -> None:
        untold: Sequence[Entry] = ()
        parts = self._history.load_parts(load, topic.keys)
        async with aclosing(parts):
            async for entries in parts:
                if untold:
                    await self._tell_part(load, topic, untold, more=True)
                untold = entries
        if untold:
            await self._tell_part(load, topic, untold, more=False)

    async def _tell_part(
        self,
        load: CommittedLoad,
        topic: Topic[WaitingWatch],
        entries: Sequence[Entry],
        *,
        more: bool,
    ) -> None:
        if topic.watchers:
            commit = ChangeEvent(load.seq, load.wal_id, entries, more=more)
            await self._tell_commit((*topic.watchers,), commit)
        if topic.asking:
            met = self._met
            previous: list[Previous] = [met.previous(entry.key) for entry in entries]
            commit = ChangeEvent(load.seq, load.wal_id, entries, previous, met.held, more=more)
            await self._tell_commit((*topic.asking,), commit)
            met.add_later(entries)
