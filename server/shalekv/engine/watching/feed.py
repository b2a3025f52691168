"""The feed: tells watches of commits at the moment at which these become part of the prefix.

Whoever applies WAL objects calls `applied` for each, in slot order; it costs nothing while nobody
watches. What is told is never taken back: only what is durable without a gap before it comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shalekv.engine.view import View
from shalekv.engine.watching.audience import Audience, Watcher
from shalekv.engine.watching.previous import Before
from shalekv.engine.watching.seen_commit import AppliedObject


class Position(NamedTuple):
    """How far a server has come."""

    seq: int  # of the last commit
    wal_id: int | None  # of the last WAL object, which may be an empty one


class CommitFeed:
    """Those who watch the prefix of one engine."""

    def __init__(self, position: Callable[[], Position]) -> None:
        """`position` is that of the prefix at this moment."""
        self._position = position
        self._audience: Audience[Watcher] = Audience()

    @property
    def is_idle(self) -> bool:
        """Whether nobody watches: then `applied` need not be called."""
        return self._audience.is_empty

    @property
    def wants_previous(self) -> bool:
        """Whether `applied` needs the state before."""
        return self._audience.wants_previous

    @property
    def position(self) -> Position:
        """How far the engine has come. Whoever joins now is told of all that comes after it."""
        return self._position()

    @property
    def audience(self) -> Audience[Watcher]:
        """Those who watch."""
        return self._audience

    def join(self, watcher: Watcher) -> Position:
        """Tell `watcher` of every commit from now on; how far the engine has come."""
        self._audience.add(watcher)
        return self._position()

    def leave(self, watcher: Watcher) -> None:
        """Tell it nothing more, if it is here."""
        self._audience.remove(watcher)

    def applied(self, obj: AppliedObject, before: View | None) -> None:
        """A WAL object has become part of the prefix.

        `before` is the state just before it, needed only if `wants_previous`. REQUIRES: called in
        slot order, exactly once for each object that is not empty, before any other task runs.
        """
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
        for topic in self._audience.topics():
            for watcher in topic.everybody():
                watcher.fall_behind(seq + 1, wal_id)
