"""Values before changes: which state is asked, and what is said when nobody knows."""

from __future__ import annotations

from shalekv.core.entry import Entry, Kind
from shalekv.core.range_tombstones import NONE
from shalekv.engine.levels.held_tree import HeldTree
from shalekv.engine.sorted_runs import Run
from shalekv.engine.view import View
from shalekv.engine.watching.previous import Before, Inside, Met, look_up
from shalekv.engine.watching.seen_commit import AppliedObject, Lack, Previous, SeenCommit
from shalekv.format.names import level_name
from tests.kit.engine.trees import Levels, range_tombstone

IN_LEVELS = Entry(b"k", 7, Kind.PUT, b"in the levels")
TREE_SEQ = 10


def held_tree(levels: Levels) -> HeldTree:
    """Levels that hold all up to commit 10, among it the key."""
    levels.add(1, [IN_LEVELS])
    tree = levels.tree()
    object.__setattr__(tree, "last_seq", TREE_SEQ)
    return HeldTree(tree, levels.open(), b"snapshot")


def view(held: HeldTree, *points: Entry, tombstone: Entry | None = None) -> View:
    run = Run.from_newest({entry.key: entry for entry in points}, max_seq=99)
    tombstones = NONE if tombstone is None else NONE.with_added([tombstone])
    return View(99, 1, (run,), tombstones, held)


async def read(previous: Previous, held: HeldTree) -> Previous:
    commit = SeenCommit(100, 1, [Entry(b"k", 100, Kind.PUT)], [previous], held)
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
