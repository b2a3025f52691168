"""Which ranges contain a key: what a change costs does not grow with ranges that do not.

Most ranges are prefixes or single keys. Those are found by looking up the beginnings of the key,
one for each length that a prefix has; other ranges, and prefixes of unusual length where there are
too many lengths, by a tree of intervals. A deleted range is looked up in a tree of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from shalekv.core.key_range import KeyRange, prefix_end
from shalekv.engine.watching.intervals import Intervals

T = TypeVar("T")
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
