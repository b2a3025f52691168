"""Intervals of keys that come and go: which of them contain a key, or meet another interval.

A search tree over the starts that is balanced by random priorities; every node knows the last end
below it, so that a query walks only towards what it finds. All operations take the logarithm of
the number of intervals, and a query as much for each that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from shalekv.core.key_range import END_OF_KEYS, KeyRange

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
