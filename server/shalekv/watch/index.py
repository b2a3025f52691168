"""Index of ranges: finds those that contain a key at a cost independent of those that do not.

Most ranges are prefixes or single keys. They are found in dictionaries: by the key itself, and by
its beginning of each length that some prefix has. Other ranges are found in an interval tree, as
are prefixes whose length is not among the first `LENGTHS_MAX` lengths in use. A deleted range is
looked up in an interval tree of all ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from shalekv.protocol.entry import END_OF_KEYS, KeyRange, prefix_end

LENGTHS_MAX = 16  # lengths of prefixes with a dictionary of their own

T = TypeVar("T")


class _Node(Generic[T]):
    __slots__ = ("end", "item", "last_end", "left", "order", "priority", "right")

    def __init__(self, keys: KeyRange, item: T) -> None:
        self.order = keys
        self.end = keys.end or END_OF_KEYS
        self.last_end = self.end
        self.item = item
        # Each process seeds the hash of bytes anew, so no choice of keys can unbalance the tree.
        self.priority = hash(("balance", *keys))
        self.left: _Node[T] | None = None
        self.right: _Node[T] | None = None


class IntervalTree(Generic[T]):
    """Items by intervals of keys; no interval is added twice.

    It is a treap: a search tree over the starts, balanced by random priorities. Every node knows
    the last end in its subtree, so a query visits only subtrees that may hold a result. Adding and
    removing take the logarithm of the number of intervals, and a query that for each result.
    """

    def __init__(self) -> None:
        """Create an empty tree."""
        self._root: _Node[T] | None = None
        self._count = 0
        self.visits = 0  # nodes visited by queries so far

    def __len__(self) -> int:
        """Return the number of intervals."""
        return self._count

    def add(self, keys: KeyRange, item: T) -> None:
        """Add an interval. REQUIRES: it is neither in the tree nor empty."""
        self._root = _insert(self._root, _Node(keys, item))
        self._count += 1

    def remove(self, keys: KeyRange) -> None:
        """Remove an interval. REQUIRES: it is in the tree."""
        self._root = _remove(self._root, keys)
        self._count -= 1

    def overlapping(self, start: bytes, end: bytes) -> Iterator[T]:
        """Yield the items whose intervals overlap `start` to `end`, exclusive (empty: no end)."""
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
        """Yield the items whose intervals contain `key`."""
        return self.overlapping(key, key + b"\0")


def _insert(node: _Node[T] | None, new: _Node[T]) -> _Node[T]:
    if node is None:
        return new
    if new.priority > node.priority:
        new.left, new.right = _split(node, new.order)
        return _updated(new)
    if new.order < node.order:
        node.left = _insert(node.left, new)
    else:
        node.right = _insert(node.right, new)
    return _updated(node)


def _remove(node: _Node[T] | None, keys: KeyRange) -> _Node[T] | None:
    assert node is not None
    if node.order == keys:
        return _join(node.left, node.right)
    if keys < node.order:
        node.left = _remove(node.left, keys)
    else:
        node.right = _remove(node.right, keys)
    return _updated(node)


def _split(node: _Node[T] | None, keys: KeyRange) -> tuple[_Node[T] | None, _Node[T] | None]:
    """Split a subtree into the intervals that sort before `keys`, and those after."""
    if node is None:
        return None, None
    if node.order < keys:
        node.right, after = _split(node.right, keys)
        return _updated(node), after
    before, node.left = _split(node.left, keys)
    return before, _updated(node)


def _join(before: _Node[T] | None, after: _Node[T] | None) -> _Node[T] | None:
    if before is None or after is None:
        return before or after
    if before.priority > after.priority:
        before.right = _join(before.right, after)
        return _updated(before)
    after.left = _join(before, after.left)
    return _updated(after)


def _updated(node: _Node[T]) -> _Node[T]:
    """Return the node with `last_end` recomputed, after its children have changed."""
    last_end = node.end
    if node.left is not None and node.left.last_end > last_end:
        last_end = node.left.last_end
    if node.right is not None and node.right.last_end > last_end:
        last_end = node.right.last_end
    node.last_end = last_end
    return node


class RangeIndex(Generic[T]):
    """Items by ranges of keys; no range is added twice."""

    def __init__(self) -> None:
        """Create an empty index."""
        self._items: dict[KeyRange, T] = {}
        self._keys: dict[bytes, T] = {}  # ranges of a single key
        self._prefixes: dict[int, dict[bytes, T]] = {}  # by length
        self._others: IntervalTree[T] = IntervalTree()
        self._all: IntervalTree[T] = IntervalTree()
        self._lookups = 0

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items."""
        return iter(self._items.values())

    @property
    def probes(self) -> int:
        """The cost of all queries so far: dictionary lookups and tree nodes visited."""
        return self._lookups + self._others.visits + self._all.visits

    def find(self, keys: KeyRange) -> T | None:
        """Return the item of exactly this range; None: there is none."""
        return self._items.get(keys)

    def add(self, keys: KeyRange, item: T) -> None:
        """Add a range. REQUIRES: it is neither in the index nor empty."""
        self._items[keys] = item
        self._all.add(keys, item)
        if _is_key(keys):
            self._keys[keys.start] = item
        elif _is_prefix(keys) and self._has_dictionary(len(keys.start)):
            self._prefixes.setdefault(len(keys.start), {})[keys.start] = item
        else:
            self._others.add(keys, item)

    def remove(self, keys: KeyRange) -> None:
        """Remove a range. REQUIRES: it is in the index."""
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
        """Return the items whose ranges contain `key`."""
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
        """Return the items whose ranges overlap `start` to `end`, exclusive (empty: no end)."""
        return [*self._all.overlapping(start, end)]

    def _has_dictionary(self, length: int) -> bool:
        return length in self._prefixes or len(self._prefixes) < LENGTHS_MAX


def _is_key(keys: KeyRange) -> bool:
    return keys.end == keys.start + b"\0"


def _is_prefix(keys: KeyRange) -> bool:
    """Return whether the range is all keys with the prefix `start` (empty: all keys)."""
    return keys.end == prefix_end(keys.start)
