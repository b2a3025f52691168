"""The feed: who is told of an object, what that costs, and when an engine can leave it out."""

from __future__ import annotations

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange, prefix_end
from shalekv.engine.view import View
from shalekv.engine.watching.feed import CommitFeed, Position
from shalekv.engine.watching.seen_commit import AppliedObject, SeenCommit

MANY = 10_000
NOTHING = View(0, None, ())


class Ear:
    """Notes what it is told, until it has enough."""

    def __init__(
        self, feed: CommitFeed, prefix: bytes, *, wants_previous: bool = False, enough: int = 1_000
    ) -> None:
        self.keys = KeyRange(prefix, prefix_end(prefix))
        self.wants_previous = wants_previous
        self.told: list[SeenCommit] = []
        self.behind: list[tuple[int, int]] = []
        self._enough = enough
        self._feed = feed
        feed.join(self)

    def tell(self, commit: SeenCommit) -> bool:
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
    return CommitFeed(lambda: Position(7, 3))


def put(key: bytes, seq: int) -> Entry:
    return Entry(key, seq, Kind.PUT, b"v")


def test_commits_of_an_object_are_told_apart_and_in_order() -> None:
    """Each commit of an object is told by itself, in the order of their numbers."""
    feed = new_feed()
    ear = Ear(feed, b"a")
    feed.applied(AppliedObject(4, 9, [put(b"a1", 9), put(b"a1", 8), put(b"a2", 8)]), None)
    assert [(each.seq, [e.key for e in each.changes]) for each in ear.told] == [
        (8, [b"a1", b"a2"]),
        (9, [b"a1"]),
    ]


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
