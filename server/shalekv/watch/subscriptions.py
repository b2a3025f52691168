"""The watches that are subscribed, by range, and the change events of a WAL object for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.loads import CommittedLoad
from shalekv.watch.change_event import AppliedObject, ChangeEvent, Previous
from shalekv.watch.index import RangeIndex
from shalekv.watch.previous import ObjectPriorValues, PriorState


class Watcher(Protocol):
    """Receives the commits to one range."""

    @property
    def keys(self) -> KeyRange:
        """The range. Never changes."""
        ...

    @property
    def wants_previous(self) -> bool:
        """Return whether its change events include previous values. Never changes."""
        ...

    def accept(self, event: ChangeEvent) -> bool:
        """Accept the next commit to the range; return whether the watcher accepts more.

        It neither waits nor raises. A watcher whose queue has no space returns False, and has left
        the feed.
        """
        ...

    def fall_behind(self, seq: int, wal_id: int) -> None:
        """Leave the feed: commits from `seq` on, in slots from `wal_id` on, have to be read."""
        ...


W = TypeVar("W", bound=Watcher)


class Topic(Generic[W]):
    """A watched range, and all its watchers."""

    __slots__ = ("keys", "watchers", "watchers_with_previous")

    def __init__(self, keys: KeyRange) -> None:
        """Create a topic without watchers."""
        self.keys = keys
        self.watchers: dict[W, None] = {}  # without previous values, in the order of joining
        self.watchers_with_previous: dict[W, None] = {}  # in the order of joining

    @property
    def is_empty(self) -> bool:
        """Return whether no watcher is left."""
        return not (self.watchers or self.watchers_with_previous)

    def all_watchers(self) -> tuple[W, ...]:
        """Return a copy of all watchers: publishing to one may remove it."""
        return (*self.watchers, *self.watchers_with_previous)


class Subscriptions(Generic[W]):
    """The set of watchers, indexed by their ranges."""

    def __init__(self) -> None:
        """Create an empty set."""
        self._topics: RangeIndex[Topic[W]] = RangeIndex()
        self._with_previous_count = 0
        self.count = 0

    @property
    def is_empty(self) -> bool:
        """Return whether there is no watcher."""
        return not self.count

    @property
    def wants_previous(self) -> bool:
        """Return whether any watcher wants previous values."""
        return self._with_previous_count > 0

    @property
    def probes(self) -> int:
        """Index lookups done so far to find the watchers of changes."""
        return self._topics.probes

    def topics(self) -> list[Topic[W]]:
        """Return all topics."""
        return [*self._topics]

    def add(self, watcher: W) -> None:
        """Add a watcher. REQUIRES: it is not in the set, and its range is not empty."""
        topic = self._topics.find(watcher.keys)
        if topic is None:
            topic = Topic[W](watcher.keys)
            self._topics.add(watcher.keys, topic)
        _members(topic, watcher)[watcher] = None
        self._with_previous_count += watcher.wants_previous
        self.count += 1

    def remove(self, watcher: W) -> None:
        """Remove a watcher, if it is in the set."""
        topic = self._topics.find(watcher.keys)
        members = {} if topic is None else _members(topic, watcher)
        if topic is None or watcher not in members:
            return
        del members[watcher]
        self._with_previous_count -= watcher.wants_previous
        self.count -= 1
        if topic.is_empty:
            self._topics.remove(watcher.keys)

    def topics_of_load(self, load: CommittedLoad) -> list[Topic[W]]:
        """Return the topics whose ranges may contain keys of a load."""
        found: dict[Topic[W], None] = {}
        for info in load.ssts:
            topics = self._topics.overlapping(info.first_key, info.last_key + b"\0")
            found.update(dict.fromkeys(topics))
        return [*found]

    def events_of(
        self, obj: AppliedObject, prior: PriorState | None
    ) -> Iterator[tuple[Sequence[W], list[ChangeEvent]]]:
        """Yield groups of watchers, with the events that the object has for them, by commit.

        `prior` is the state before the object, needed if any watcher wants previous values. The
        commit of a load yields nothing.
        """
        values = None if prior is None else ObjectPriorValues(obj, prior)
        for topic, changes in self._changes(obj).items():
            by_seq: dict[int, list[tuple[Entry, int]]] = {}
            for entry, at in changes:
                by_seq.setdefault(entry.seq, []).append((entry, at))
            commits = sorted(by_seq.items())
            if topic.watchers:
                plain = [ChangeEvent(seq, obj.wal_id, [e for e, _ in c]) for seq, c in commits]
                yield (*topic.watchers,), plain
            if topic.watchers_with_previous and values is not None and prior is not None:
                full = [
                    _event_with_previous(seq, obj.wal_id, c, values, prior) for seq, c in commits
                ]
                yield (*topic.watchers_with_previous,), full

    def _changes(self, obj: AppliedObject) -> dict[Topic[W], list[tuple[Entry, int]]]:
        """Return the changes for each topic, range deletes first.

        Each comes with its position among the points of the object, -1 for a range delete.
        """
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
    return topic.watchers_with_previous if watcher.wants_previous else topic.watchers


def _event_with_previous(
    seq: int,
    wal_id: int,
    changes: Sequence[tuple[Entry, int]],
    values: ObjectPriorValues,
    prior: PriorState,
) -> ChangeEvent:
    previous: list[Previous] = [None if at < 0 else values.previous(at) for _, at in changes]
    return ChangeEvent(seq, wal_id, [entry for entry, _ in changes], previous, prior.pinned)


def _clipped(tombstone: Entry, keys: KeyRange) -> Entry:
    """Return the part of a range delete that is inside a range."""
    start = max(tombstone.key, keys.start)
    ends = [end for end in (tombstone.value, keys.end) if end]
    return tombstone._replace(key=start, value=min(ends, default=b""))
