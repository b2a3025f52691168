"""The commit feed: the watches an object is published to, the range index, and previous values."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.format.names import level_name
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, KeyRange, Kind, prefix_end
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.watch.change_event import AppliedObject, ChangeEvent, Previous, Unresolved
from shalekv.watch.feed import CommitFeed, FeedPosition
from shalekv.watch.index import LENGTHS_MAX, RangeIndex
from shalekv.watch.previous import ObjectPriorValues, ReplayedState, ViewBefore, read_previous
from tests.kit.engine.levels import Levels, range_tombstone

MANY = 10_000
EMPTY_VIEW = ReadView(0, None, ())


class RecordingWatcher:
    """Records the events published to it, and falls behind after `event_count_max` of them."""

    def __init__(
        self,
        feed: CommitFeed,
        prefix: bytes,
        *,
        wants_previous: bool = False,
        event_count_max: int = 1_000,
    ) -> None:
        self.keys = KeyRange(prefix, prefix_end(prefix))
        self.wants_previous = wants_previous
        self.events: list[ChangeEvent] = []
        self.behind: list[tuple[int, int]] = []
        self._event_count_max = event_count_max
        self._feed = feed
        feed.join(self)

    def accept(self, event: ChangeEvent) -> bool:
        if len(self.events) == self._event_count_max:
            self.fall_behind(event.seq, event.wal_id)
            return False
        self.events.append(event)
        return True

    def fall_behind(self, seq: int, wal_id: int) -> None:
        self._feed.leave(self)
        self.behind.append((seq, wal_id))


def new_feed() -> CommitFeed:
    """Create the feed of an engine that has applied slot 3."""
    return CommitFeed(lambda: FeedPosition(7, 3))


def put(key: bytes, seq: int) -> Entry:
    return Entry(key, seq, Kind.PUT, b"v")


def test_watch_that_falls_behind_leaves_between_two_commits() -> None:
    """A watch that falls behind within an object gets no further commit of it; others get all."""
    feed = new_feed()
    slow, quick = RecordingWatcher(feed, b"a", event_count_max=1), RecordingWatcher(feed, b"a")
    feed.applied(AppliedObject(4, 10, [put(b"a", seq) for seq in (10, 9, 8)]), None)
    assert [each.seq for each in slow.events] == [8]
    assert slow.behind == [(9, 4)]
    assert [each.seq for each in quick.events] == [8, 9, 10]


def test_jump_of_the_engine_makes_all_watches_read_the_store() -> None:
    """When a replica skips objects, every watch has to read them from the store."""
    feed = new_feed()
    watchers = [RecordingWatcher(feed, b"a"), RecordingWatcher(feed, b"b", wants_previous=True)]
    feed.jumped(7, 4)
    assert [watcher.behind for watcher in watchers] == [[(8, 4)]] * 2
    assert feed.is_idle


def probes(feed: CommitFeed, obj: AppliedObject) -> int:
    before = feed.subscriptions.probes
    feed.applied(obj, EMPTY_VIEW)
    return feed.subscriptions.probes - before


def test_cost_of_a_write_does_not_grow_with_watches_that_do_not_match() -> None:
    """A change takes as many lookups among ten thousand watches of other prefixes as without them,
    and is published only to the watch that matches.
    """
    few, many = new_feed(), new_feed()
    matching = [RecordingWatcher(feed, b"w/00000/") for feed in (few, many)]
    others = [RecordingWatcher(many, b"w/%05d/" % number) for number in range(1, MANY)]
    obj = AppliedObject(4, 107, [put(b"w/00000/%d" % n, 8 + n) for n in range(100)])
    assert probes(many, obj) == probes(few, obj)
    assert [len(watcher.events) for watcher in matching] == [100, 100]
    assert not any(watcher.events for watcher in others)


SEEDS = range(20)
STEPS = 400
ALPHABET = b"\x00ab\xff"


def some_key(random: Random, most: int = 4) -> bytes:
    """Return a short key of few letters, so that many keys and ranges overlap."""
    return bytes(random.choices(ALPHABET, k=random.randint(1, most)))


def some_range(random: Random) -> KeyRange:
    """Return a prefix, a single key, a half-open range or the whole range; never an empty one."""
    kind = random.randrange(6)
    key = some_key(random)
    if kind == 0:
        return KeyRange(key, prefix_end(key))
    if kind == 1:
        return KeyRange(key, key + b"\0")
    if kind == 2:
        return KeyRange(b"", b"")
    if kind == 3:
        return KeyRange(key, b"")
    if kind == 4:
        return KeyRange(b"", key)
    other = some_key(random)
    start, end = min(key, other), max(key, other)
    return KeyRange(start, end) if start < end else KeyRange(start, b"")


def contains(keys: KeyRange, key: bytes) -> bool:
    return keys.start <= key and (not keys.end or key < keys.end)


def overlaps(keys: KeyRange, start: bytes, end: bytes) -> bool:
    return (not keys.end or start < keys.end) and (not end or keys.start < end)


@pytest.mark.parametrize("seed", SEEDS)
def test_index_finds_the_same_as_a_check_of_every_range(seed: int) -> None:
    """During random additions and removals, both queries find exactly what the model finds."""
    random = Random(seed)
    index: RangeIndex[KeyRange] = RangeIndex()
    model: set[KeyRange] = set()
    for _ in range(STEPS):
        keys = some_range(random)
        if keys in model:
            index.remove(keys)
            model.remove(keys)
        else:
            index.add(keys, keys)
            model.add(keys)
        assert len(index) == len(model)
        key = some_key(random)
        found = index.matching(key)
        assert sorted(found) == sorted(each for each in model if contains(each, key))
        deleted = some_range(random)
        found = index.overlapping(deleted.start, deleted.end)
        assert sorted(found) == sorted(each for each in model if overlaps(each, *deleted))


def test_prefixes_of_many_lengths_are_all_found() -> None:
    """Prefixes with more lengths than have dictionaries of their own are all found."""
    index: RangeIndex[int] = RangeIndex()
    lengths = range(1, 3 * LENGTHS_MAX)
    for length in lengths:
        index.add(KeyRange(b"a" * length, prefix_end(b"a" * length)), length)
    assert sorted(index.matching(b"a" * lengths.stop)) == [*lengths]
    for length in lengths:
        index.remove(KeyRange(b"a" * length, prefix_end(b"a" * length)))
    assert index.matching(b"a" * lengths.stop) == []


def probes_of(index: RangeIndex[int], keys: list[bytes]) -> int:
    before = index.probes
    for key in keys:
        index.matching(key)
    return index.probes - before


def test_a_change_costs_a_logarithm_among_many_ranges_that_it_does_not_match() -> None:
    """A key visits some twenty nodes among ten thousand ranges of any shape, not ten thousand."""
    index: RangeIndex[int] = RangeIndex()
    for number in range(MANY):
        index.add(KeyRange(b"%06d" % (2 * number), b"%06d5" % (2 * number)), number)
    keys = [b"%06d" % (2 * number + 1) for number in range(0, MANY, 100)]
    assert not any(index.matching(key) for key in keys)
    assert probes_of(index, keys) < 60 * len(keys)


def test_a_range_delete_costs_by_the_ranges_it_overlaps() -> None:
    """A deleted range that overlaps two of ten thousand ranges costs only a few probes."""
    index: RangeIndex[int] = RangeIndex()
    for number in range(MANY):
        prefix = b"%06d" % number
        index.add(KeyRange(prefix, prefix_end(prefix)), number)
    before = index.probes
    assert sorted(index.overlapping(b"0005000", b"000502")) == [500, 501]
    assert index.probes - before < 100


IN_LEVELS = Entry(b"k", 7, Kind.PUT, b"in the levels")
LEVELS_SEQ = 10


def pinned_version(levels: Levels) -> PinnedVersion:
    """Pin a version whose levels hold everything up to commit 10, including the key."""
    levels.add(1, [IN_LEVELS])
    version = levels.version()
    object.__setattr__(version, "last_seq", LEVELS_SEQ)
    return PinnedVersion(version, levels.open(), b"snapshot")


def view(held: PinnedVersion, *points: Entry, tombstone: Entry | None = None) -> ReadView:
    run = MemoryRun.from_newest({entry.key: entry for entry in points}, max_seq=99)
    tombstones = (
        NO_RANGE_TOMBSTONES if tombstone is None else NO_RANGE_TOMBSTONES.with_added([tombstone])
    )
    return ReadView(99, 1, (run,), tombstones, held)


async def read(previous: Previous, held: PinnedVersion) -> Previous:
    commit = ChangeEvent(100, 1, [Entry(b"k", 100, Kind.PUT)], [previous], held)
    await read_previous([commit])
    assert commit.previous is not None
    assert commit.pinned is None
    return commit.previous[0]


async def test_memory_comes_before_the_levels() -> None:
    """A value in memory is returned at once; else the levels have to be read."""
    held = pinned_version(Levels())
    own = Entry(b"k", 20, Kind.PUT, b"in memory")
    assert ViewBefore(view(held, own)).previous(b"k") == own
    previous = ViewBefore(view(held)).previous(b"k")
    assert previous is Unresolved.UNREAD
    assert await read(previous, held) == IN_LEVELS
    assert ViewBefore(view(held)).previous(b"other") is None


async def test_range_delete_that_memory_is_about_to_drop_hides_nothing() -> None:
    """A range delete that the levels hold as well does not hide a newer put, which memory may have
    dropped already.
    """
    held = pinned_version(Levels())
    old = range_tombstone(b"a", b"z", 5)
    assert ViewBefore(view(held, tombstone=old)).previous(b"k") is Unresolved.UNREAD
    found = ViewBefore(view(held, tombstone=range_tombstone(b"a", b"z", 11))).previous(b"k")
    assert isinstance(found, Entry)
    assert found.kind is Kind.TOMBSTONE


async def test_value_is_unknown_when_the_levels_are_gone() -> None:
    """When the levels cannot be read any more, the value is unknown."""
    levels = Levels()
    held = pinned_version(levels)
    levels.objects.remove(level_name(levels.infos[0].id))
    assert await read(Unresolved.UNREAD, held) is Unresolved.UNKNOWN


def test_commits_of_one_object_come_one_after_the_other() -> None:
    """In an object the previous value is the version before, unless a range delete is between."""
    newest, middle, first = (Entry(b"k", seq, Kind.PUT, b"%d" % seq) for seq in (9, 7, 5))
    deleted = range_tombstone(b"a", b"", 8)
    obj = AppliedObject(1, 9, [newest, middle, first], [deleted])
    prior = ReplayedState(None, size_bytes_max=1 << 20)
    values = ObjectPriorValues(obj, prior)
    assert [values.previous(at) for at in range(3)] == [None, first, Unresolved.UNKNOWN]


def test_replayed_values_are_forgotten_beyond_the_bound() -> None:
    """The values that a pass remembers are bounded: beyond the bound they are unknown."""
    state = ReplayedState(None, size_bytes_max=10_000)
    state.add([Entry(b"a", 1, Kind.PUT, bytes(100))])
    assert isinstance(state.previous(b"a"), Entry)
    state.add([Entry(b"b", 2, Kind.PUT, bytes(10_000))])
    assert state.previous(b"a") is state.previous(b"b") is Unresolved.UNKNOWN
    state.add_later(
        [Entry(b"c", 3, Kind.PUT, bytes(6_000)), Entry(b"d", 3, Kind.PUT, bytes(6_000))]
    )
    state.add_pending()
    assert state.previous(b"c") is Unresolved.UNKNOWN
    state.add([Entry(b"e", 4, Kind.PUT, b"known")])
    assert isinstance(state.previous(b"e"), Entry)
