"""The feed of watches: who is told of an object, found by which index, with which values before."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.format.names import level_name
from shalekv.protocol.entry import Entry, KeyRange, Kind, prefix_end
from shalekv.protocol.range_tombstones import NONE
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.watch.change_event import AppliedObject, ChangeEvent, Lack, Previous
from shalekv.watch.feed import CommitFeed, FeedPosition
from shalekv.watch.index import LENGTHS_MAX, RangeIndex
from shalekv.watch.previous import Before, Inside, Met, look_up
from tests.kit.engine.trees import Levels, range_tombstone

MANY = 10_000
NOTHING = ReadView(0, None, ())


class Ear:
    """Notes what it is told, until it has enough."""

    def __init__(
        self, feed: CommitFeed, prefix: bytes, *, wants_previous: bool = False, enough: int = 1_000
    ) -> None:
        self.keys = KeyRange(prefix, prefix_end(prefix))
        self.wants_previous = wants_previous
        self.told: list[ChangeEvent] = []
        self.behind: list[tuple[int, int]] = []
        self._enough = enough
        self._feed = feed
        feed.join(self)

    def tell(self, commit: ChangeEvent) -> bool:
        if len(self.told) == self._enough:
            self.fall_behind(commit.seq, commit.wal_id)
            return False
        self.told.append(commit)
        return True

    def fall_behind(self, seq: int, wal_id: int) -> None:
        self._feed.leave(self)
        self.behind.append((seq, wal_id))


def new_feed() -> CommitFeed:
    """A feed of an engine that has applied slot 3."""
    return CommitFeed(lambda: FeedPosition(7, 3))


def put(key: bytes, seq: int) -> Entry:
    return Entry(key, seq, Kind.PUT, b"v")


def test_who_has_enough_leaves_between_two_commits() -> None:
    """A watch that falls behind within an object is told nothing more of it, others all."""
    feed = new_feed()
    slow, quick = Ear(feed, b"a", enough=1), Ear(feed, b"a")
    feed.applied(AppliedObject(4, 10, [put(b"a", seq) for seq in (10, 9, 8)]), None)
    assert [each.seq for each in slow.told] == [8]
    assert slow.behind == [(9, 4)]
    assert [each.seq for each in quick.told] == [8, 9, 10]


def test_jump_of_the_engine_sends_all_to_the_store() -> None:
    """When a replica goes on behind what it has not applied, every watch has to read that."""
    feed = new_feed()
    ears = [Ear(feed, b"a"), Ear(feed, b"b", wants_previous=True)]
    feed.jumped(7, 4)
    assert [ear.behind for ear in ears] == [[(8, 4)]] * 2
    assert feed.is_idle


def probes(feed: CommitFeed, obj: AppliedObject) -> int:
    before = feed.audience.probes
    feed.applied(obj, NOTHING)
    return feed.audience.probes - before


def test_cost_of_a_write_does_not_grow_with_watches_that_do_not_match() -> None:
    """Among ten thousand watches of other prefixes a change is looked up as often as among one, and
    only the watch that matches is told.
    """
    few, many = new_feed(), new_feed()
    matching = [Ear(feed, b"w/00000/") for feed in (few, many)]
    others = [Ear(many, b"w/%05d/" % number) for number in range(1, MANY)]
    obj = AppliedObject(4, 107, [put(b"w/00000/%d" % n, 8 + n) for n in range(100)])
    assert probes(many, obj) == probes(few, obj)
    assert [len(ear.told) for ear in matching] == [100, 100]
    assert not any(ear.told for ear in others)


SEEDS = range(20)
STEPS = 400
ALPHABET = b"\x00ab\xff"


def some_key(random: Random, most: int = 4) -> bytes:
    """A short key of few letters, so that much of it meets."""
    return bytes(random.choices(ALPHABET, k=random.randint(1, most)))


def some_range(random: Random) -> KeyRange:
    """A prefix, a key, a half-open or a whole range; never an empty one."""
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
def test_index_finds_what_a_look_at_every_range_finds(seed: int) -> None:
    """Through random additions and removals, both queries find exactly what the model finds."""
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
        met = index.overlapping(deleted.start, deleted.end)
        assert sorted(met) == sorted(each for each in model if overlaps(each, *deleted))


def test_prefixes_of_many_lengths_are_all_found() -> None:
    """Prefixes beyond the lengths that are looked up one by one are found like the others."""
    index: RangeIndex[int] = RangeIndex()
    lengths = range(1, 3 * LENGTHS_MAX)
    for length in lengths:
        index.add(KeyRange(b"a" * length, prefix_end(b"a" * length)), length)
    assert sorted(index.matching(b"a" * lengths.stop)) == [*lengths]
    for length in lengths:
        index.remove(KeyRange(b"a" * length, prefix_end(b"a" * length)))
    assert index.matching(b"a" * lengths.stop) == []


def costs(index: RangeIndex[int], keys: list[bytes]) -> int:
    before = index.probes
    for key in keys:
        index.matching(key)
    return index.probes - before


def test_a_change_costs_a_logarithm_among_many_ranges_that_it_does_not_match() -> None:
    """Ten thousand ranges of any shape cost some twenty nodes for a key, not ten thousand."""
    index: RangeIndex[int] = RangeIndex()
    for number in range(MANY):
        index.add(KeyRange(b"%06d" % (2 * number), b"%06d5" % (2 * number)), number)
    keys = [b"%06d" % (2 * number + 1) for number in range(0, MANY, 100)]
    assert not any(index.matching(key) for key in keys)
    assert costs(index, keys) < 60 * len(keys)


def test_a_range_delete_costs_what_it_meets() -> None:
    """A deleted range that meets two of ten thousand watched ranges costs little more than two."""
    index: RangeIndex[int] = RangeIndex()
    for number in range(MANY):
        prefix = b"%06d" % number
        index.add(KeyRange(prefix, prefix_end(prefix)), number)
    before = index.probes
    assert sorted(index.overlapping(b"0005000", b"000502")) == [500, 501]
    assert index.probes - before < 100


IN_LEVELS = Entry(b"k", 7, Kind.PUT, b"in the levels")
TREE_SEQ = 10


def held_tree(levels: Levels) -> PinnedVersion:
    """Levels that hold all up to commit 10, among it the key."""
    levels.add(1, [IN_LEVELS])
    tree = levels.tree()
    object.__setattr__(tree, "last_seq", TREE_SEQ)
    return PinnedVersion(tree, levels.open(), b"snapshot")


def view(held: PinnedVersion, *points: Entry, tombstone: Entry | None = None) -> ReadView:
    run = MemoryRun.from_newest({entry.key: entry for entry in points}, max_seq=99)
    tombstones = NONE if tombstone is None else NONE.with_added([tombstone])
    return ReadView(99, 1, (run,), tombstones, held)


async def read(previous: Previous, held: PinnedVersion) -> Previous:
    commit = ChangeEvent(100, 1, [Entry(b"k", 100, Kind.PUT)], [previous], held)
    await look_up([commit])
    assert commit.previous is not None
    assert commit.held is None
    return commit.previous[0]


async def test_memory_comes_before_the_levels() -> None:
    """What memory says of a key is told at once; else the levels are asked."""
    held = held_tree(Levels())
    own = Entry(b"k", 20, Kind.PUT, b"in memory")
    assert Before(view(held, own)).previous(b"k") == own
    previous = Before(view(held)).previous(b"k")
    assert previous is Lack.UNREAD
    assert await read(previous, held) == IN_LEVELS
    assert Before(view(held)).previous(b"other") is None


async def test_range_delete_that_memory_is_about_to_drop_hides_nothing() -> None:
    """A range delete that is in the levels as well does not hide a put that was newer: memory may
    have let go of that one already.
    """
    held = held_tree(Levels())
    old = range_tombstone(b"a", b"z", 5)
    assert Before(view(held, tombstone=old)).previous(b"k") is Lack.UNREAD
    found = Before(view(held, tombstone=range_tombstone(b"a", b"z", 11))).previous(b"k")
    assert isinstance(found, Entry)
    assert found.kind is Kind.TOMBSTONE


async def test_levels_that_are_gone_leave_it_unknown() -> None:
    """When the levels cannot be read any more, nobody knows the value."""
    levels = Levels()
    held = held_tree(levels)
    levels.objects.remove(level_name(levels.infos[0].id))
    assert await read(Lack.UNREAD, held) is Lack.UNKNOWN


def test_commits_of_one_object_come_one_after_the_other() -> None:
    """Inside an object the version before counts, and a range delete between the two."""
    newest, middle, first = (Entry(b"k", seq, Kind.PUT, b"%d" % seq) for seq in (9, 7, 5))
    deleted = range_tombstone(b"a", b"", 8)
    obj = AppliedObject(1, 9, [newest, middle, first], [deleted])
    outside = Met(None, size_bytes_max=1 << 20)
    inside = Inside(obj, outside)
    assert [inside.previous(at) for at in range(3)] == [None, first, Lack.UNKNOWN]


def test_what_was_met_is_forgotten_when_it_is_too_much() -> None:
    """Values that a pass remembers are bounded: past that it says that it does not know."""
    met = Met(None, size_bytes_max=10_000)
    met.add([Entry(b"a", 1, Kind.PUT, bytes(100))])
    assert isinstance(met.previous(b"a"), Entry)
    met.add([Entry(b"b", 2, Kind.PUT, bytes(10_000))])
    assert met.previous(b"a") is met.previous(b"b") is Lack.UNKNOWN
    met.add_later([Entry(b"c", 3, Kind.PUT, bytes(6_000)), Entry(b"d", 3, Kind.PUT, bytes(6_000))])
    met.land()
    assert met.previous(b"c") is Lack.UNKNOWN
    met.add([Entry(b"e", 4, Kind.PUT, b"known")])
    assert isinstance(met.previous(b"e"), Entry)
