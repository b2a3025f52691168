"""Those who watch, by the ranges that they watch, and what a WAL object is to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.loads import CommittedLoad
from shalekv.watch.change_event import AppliedObject, ChangeEvent, Previous
from shalekv.watch.index import RangeIndex
from shalekv.watch.previous import Inside, Outside


class Watcher(Protocol):
    """Is told of the commits to one range."""

    @property
    def keys(self) -> KeyRange:
        """The range. Never changes."""
        ...

    @property
    def wants_previous(self) -> bool:
        """Whether it is told the values before. Never changes."""
        ...

    def tell(self, commit: ChangeEvent) -> bool:
        """The next commit to the range; whether the watcher wants to hear more.

        It neither waits nor raises. Who has fallen behind returns False, and has left.
        """
        ...

    def fall_behind(self, seq: int, wal_id: int) -> None:
        """Leave: the commits from `seq` on, in slots from `wal_id` on, have to be read."""
        ...


W = TypeVar("W", bound=Watcher)


class Topic(Generic[W]):
    """All who watch the same range."""

    __slots__ = ("asking", "keys", "watchers")

    def __init__(self, keys: KeyRange) -> None:
        """Nobody does yet."""
        self.keys = keys
        self.watchers: dict[W, None] = {}  # in the order of their coming
        self.asking: dict[W, None] = {}  # ... who want the values before

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left."""
        return not (self.watchers or self.asking)

    def everybody(self) -> tuple[W, ...]:
        """All of them, as of now: who is told something may leave."""
        return (*self.watchers, *self.asking)


class Subscriptions(Generic[W]):
    """Those who watch."""

    def __init__(self) -> None:
        """Nobody does."""
        self._topics: RangeIndex[Topic[W]] = RangeIndex()
        self._asking_count = 0
        self.count = 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody watches."""
        return not self.count

    @property
    def wants_previous(self) -> bool:
        """Whether anybody wants the values before."""
        return self._asking_count > 0

    @property
    def probes(self) -> int:
        """What it has cost so far to find out whom changes concern, in lookups."""
        return self._topics.probes

    def topics(self) -> list[Topic[W]]:
        """All ranges that are watched."""
        return [*self._topics]

    def add(self, watcher: W) -> None:
        """REQUIRES: it is not here, and its range not empty."""
        topic = self._topics.find(watcher.keys)
        if topic is None:
            topic = Topic[W](watcher.keys)
            self._topics.add(watcher.keys, topic)
        (topic.asking if watcher.wants_previous else topic.watchers)[watcher] = None
        self._asking_count += watcher.wants_previous
        self.count += 1

    def remove(self, watcher: W) -> None:
        """Forget it, if it is here."""
        topic = self._topics.find(watcher.keys)
        members = {} if topic is None else _members(topic, watcher)
        if topic is None or watcher not in members:
            return
        del members[watcher]
        self._asking_count -= watcher.wants_previous
        self.count -= 1
        if topic.is_empty:
            self._topics.remove(watcher.keys)

    def topics_of_load(self, load: CommittedLoad) -> list[Topic[W]]:
        """The ranges that a load may have keys of."""
        found: dict[Topic[W], None] = {}
        for info in load.ssts:
            topics = self._topics.overlapping(info.first_key, info.last_key + b"\0")
            found.update(dict.fromkeys(topics))
        return [*found]

    def commits_of(
        self, obj: AppliedObject, outside: Outside | None
    ) -> Iterator[tuple[Sequence[W], list[ChangeEvent]]]:
        """Who is to be told of which commits of an object, those of each in their order.

        `outside` is the state before, if anybody wants that. A load is none of its commits.
        """
        inside = None if outside is None else Inside(obj, outside)
        for topic, changes in self._changes(obj).items():
            by_seq: dict[int, list[tuple[Entry, int]]] = {}
            for entry, at in changes:
                by_seq.setdefault(entry.seq, []).append((entry, at))
            commits = sorted(by_seq.items())
            if topic.watchers:
                seen = [ChangeEvent(seq, obj.wal_id, [e for e, _ in c]) for seq, c in commits]
                yield (*topic.watchers,), seen
            if topic.asking and inside is not None and outside is not None:
                asked = [_asked(seq, obj.wal_id, c, inside, outside) for seq, c in commits]
                yield (*topic.asking,), asked

    def _changes(self, obj: AppliedObject) -> dict[Topic[W], list[tuple[Entry, int]]]:
        """What each range is told of, range deletes first; and which point of the object it is."""
        found: dict[Topic[W], list[tuple[Entry, int]]] = {}
        for entry in obj.range_tombstones:
            for topic in self._topics.overlapping(entry.key, entry.value):
                found.setdefault(topic, []).append((_clipped(entry, topic.keys), -1))
        matching = self._topics.matching
        for at, entry in enumerate(obj.points):
            for topic in matching(entry.key):
                found.setdefault(topic, []).append((entry, at))
        return found


def _members(topic: Topic[W], watcher: W) -> dict[W, None]:
    return topic.asking if watcher.wants_previous else topic.watchers


def _asked(
    seq: int,
    wal_id: int,
    changes: Sequence[tuple[Entry, int]],
    inside: Inside,
    outside: Outside,
) -> ChangeEvent:
    previous: list[Previous] = [None if at < 0 else inside.previous(at) for _, at in changes]
    return ChangeEvent(seq, wal_id, [entry for entry, _ in changes], previous, outside.held)


def _clipped(tombstone: Entry, keys: KeyRange) -> Entry:
    """The part of a range delete that is inside a range."""
    start = max(tombstone.key, keys.start)
    ends = [end for end in (tombstone.value, keys.end) if end]
    return tombstone._replace(key=start, value=min(ends, default=b""))
