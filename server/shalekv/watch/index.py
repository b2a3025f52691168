"""Which ranges contain a key: what a change costs does not grow with ranges that do not.

Most ranges are prefixes or single keys. Those are found by looking up the beginnings of the key,
one for each length that a prefix has; other ranges, and prefixes of unusual length where there are
too many lengths, by a tree of intervals. A deleted range is looked up in a tree of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from shalekv.protocol.entry import END_OF_KEYS, KeyRange, prefix_end

# --- intervals
# Intervals of keys that come and go: which of them contain a key, or meet another interval.
#
# A search tree over the starts that is balanced by random priorities; every node knows the last
# end below it, so that a query walks only towards what it finds. All operations take the
# logarithm of the number of intervals, and a query as much for each that it finds.


T = TypeVar("T")


class _Node(Generic[T]):
    __slots__ = ("end", "item", "last_end", "left", "order", "priority", "right")

    def __init__(self, keys: KeyRange, item: T) -> None:
        self.order = keys
        self.end = keys.end or END_OF_KEYS
        self.last_end = self.end
        self.item = item
        # The hash of bytes is seeded anew by every process: nobody can choose keys that make the
        # tree a list.
        self.priority = hash(("balance", *keys))
        self.left: _Node[T] | None = None
        self.right: _Node[T] | None = None


class Intervals(Generic[T]):
    """Items by intervals of keys, each of which stands here once."""

    def __init__(self) -> None:
        """There are none."""
        self._root: _Node[T] | None = None
        self._count = 0
        self.visits = 0  # of nodes by queries, which is what they cost

    def __len__(self) -> int:
        """How many intervals there are."""
        return self._count

    def add(self, keys: KeyRange, item: T) -> None:
        """REQUIRES: this interval is not here, and not empty."""
        self._root = _inserted(self._root, _Node(keys, item))
        self._count += 1

    def remove(self, keys: KeyRange) -> None:
        """REQUIRES: this interval is here."""
        self._root = _removed(self._root, keys)
        self._count -= 1

    def meeting(self, start: bytes, end: bytes) -> Iterator[T]:
        """The items whose intervals have keys from `start` on and before `end` (empty: no end)."""
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node is None or node.last_end <= start:
                continue
            self.visits += 1
            waiting.append(node.left)
            if not end or node.order.start < end:
                waiting.append(node.right)
                if node.end > start:
                    yield node.item

    def containing(self, key: bytes) -> Iterator[T]:
        """The items whose intervals contain `key`."""
        return self.meeting(key, key + b"\0")


def _inserted(node: _Node[T] | None, new: _Node[T]) -> _Node[T]:
    if node is None:
        return new
    if new.priority > node.priority:
        new.left, new.right = _split(node, new.order)
        return _counted(new)
    if new.order < node.order:
        node.left = _inserted(node.left, new)
    else:
        node.right = _inserted(node.right, new)
    return _counted(node)


def _removed(node: _Node[T] | None, keys: KeyRange) -> _Node[T] | None:
    assert node is not None
    if node.order == keys:
        return _joined(node.left, node.right)
    if keys < node.order:
        node.left = _removed(node.left, keys)
    else:
        node.right = _removed(node.right, keys)
    return _counted(node)


def _split(node: _Node[T] | None, keys: KeyRange) -> tuple[_Node[T] | None, _Node[T] | None]:
    """What stands before `keys`, and what behind."""
    if node is None:
        return None, None
    if node.order < keys:
        node.right, behind = _split(node.right, keys)
        return _counted(node), behind
    before, node.left = _split(node.left, keys)
    return before, _counted(node)


def _joined(before: _Node[T] | None, behind: _Node[T] | None) -> _Node[T] | None:
    if before is None or behind is None:
        return before or behind
    if before.priority > behind.priority:
        before.right = _joined(before.right, behind)
        return _counted(before)
    behind.left = _joined(before, behind.left)
    return _counted(behind)


def _counted(node: _Node[T]) -> _Node[T]:
    """The node, when what is below it has changed."""
    last_end = node.end
    if node.left is not None and node.left.last_end > last_end:
        last_end = node.left.last_end
    if node.right is not None and node.right.last_end > last_end:
        last_end = node.right.last_end
    node.last_end = last_end
    return node


# --- index


LENGTHS_MAX = 16  # of prefixes that are looked up one by one


class RangeIndex(Generic[T]):
    """Items by ranges of keys, each of which stands here once."""

    def __init__(self) -> None:
        """There are none."""
        self._items: dict[KeyRange, T] = {}
        self._keys: dict[bytes, T] = {}  # ranges of a single key
        self._prefixes: dict[int, dict[bytes, T]] = {}  # by length
        self._others: Intervals[T] = Intervals()
        self._all: Intervals[T] = Intervals()
        self._lookups = 0

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """All items."""
        return iter(self._items.values())

    @property
    def probes(self) -> int:
        """Lookups and nodes visited by all queries so far: what they have cost."""
        return self._lookups + self._others.visits + self._all.visits

    def find(self, keys: KeyRange) -> T | None:
        """The item of exactly this range."""
        return self._items.get(keys)

    def add(self, keys: KeyRange, item: T) -> None:
        """REQUIRES: this range is not here, and not empty."""
        self._items[keys] = item
        self._all.add(keys, item)
        if _is_key(keys):
            self._keys[keys.start] = item
        elif _is_prefix(keys) and self._has_room(len(keys.start)):
            self._prefixes.setdefault(len(keys.start), {})[keys.start] = item
        else:
            self._others.add(keys, item)

    def remove(self, keys: KeyRange) -> None:
        """REQUIRES: this range is here."""
        del self._items[keys]
        self._all.remove(keys)
        if _is_key(keys):
            del self._keys[keys.start]
            return
        length = len(keys.start)
        prefixes = self._prefixes.get(length, {}) if _is_prefix(keys) else {}
        if keys.start in prefixes:
            del prefixes[keys.start]
            if not prefixes:
                del self._prefixes[length]
        else:
            self._others.remove(keys)

    def matching(self, key: bytes) -> list[T]:
        """The items whose ranges contain `key`."""
        found = [
            item
            for length, prefixes in self._prefixes.items()
            if (item := prefixes.get(key[:length])) is not None
        ]
        self._lookups += len(self._prefixes) + 1
        item = self._keys.get(key)
        if item is not None:
            found.append(item)
        if len(self._others):
            found += self._others.containing(key)
        return found

    def overlapping(self, start: bytes, end: bytes) -> list[T]:
        """The items whose ranges have keys from `start` on and before `end` (empty: no end)."""
        return [*self._all.meeting(start, end)]

    def _has_room(self, length: int) -> bool:
        return length in self._prefixes or len(self._prefixes) < LENGTHS_MAX


def _is_key(keys: KeyRange) -> bool:
    return keys.end == keys.start + b"\0"


def _is_prefix(keys: KeyRange) -> bool:
    """Whether the range is all keys that begin as its start; all keys are, with the empty one."""
    return keys.end == prefix_end(keys.start)
