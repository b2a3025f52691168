"""What the levels say of the keys that a write rests on: looked up before it is decided.

A transaction is decided in one go, by what is in memory; so whatever it may ask of the levels is
fetched first. The answers are those of one tree. As long as the memtable holds all that came after
that tree, the transaction can be decided again by them (see `TreeKeeper`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shalekv.errors import RangeTooCostly
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.read.scan import Merge
from shalekv.read.version import ReadView

# Keys with a value that are fetched of a range which must be empty: one is enough, unless the
# transaction is decided again and finds it deleted.
WITNESS_COUNT = 8


class Base:
    """Stands for one tree: held by what was decided by it and may be decided again.

    Memory keeps all that came after that tree as long as anybody holds this (see `TreeKeeper`).
    """

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class RangeBelow:
    """Keys of a range that have a value in the levels."""

    entries: Sequence[Entry]
    is_whole: bool  # whether these are all


@dataclass(frozen=True, slots=True)
class ReadSet:
    """The answers of one tree. REQUIRES: nobody asks for more than was looked up."""

    base: Base | None = None  # None: nothing was looked up
    found: Mapping[bytes, Entry] = field(default_factory=dict)
    ranges: Mapping[KeyRange, RangeBelow] = field(default_factory=dict)
    record: Entry | None = None  # of the idempotency key


NOTHING_BELOW = ReadSet()


async def range_below(
    levels: ReadView,
    keys: KeyRange,
    *,
    now_ms: int,
    is_shadowed: Callable[[bytes], bool],
    is_hidden: Callable[[bytes], bool],
    count_max: int,
) -> RangeBelow:
    """The first keys of the range with a value in the levels of which memory does not speak.

    `levels` is a view without runs. What is in memory and durable tells of a key that
    `is_shadowed`; of one that `is_hidden` something may tell that is not durable, so that it counts
    or not. Looks at `count_max` keys at most, or raises `RangeTooCostly`.
    """
    witnesses: list[Entry] = []
    seen_count = looked_at = 0
    merge = Merge(levels, keys, reverse=False)
    while await merge.fetch():
        entries = merge.slice()
        visible = [entry for entry in entries if entry.is_visible(now_ms)]
        left = [entry for entry in visible if not is_shadowed(entry.key)]
        witnesses += left
        seen_count += sum(not is_hidden(entry.key) for entry in left)
        if seen_count >= WITNESS_COUNT:
            return RangeBelow(witnesses, is_whole=False)
        looked_at += len(entries)
        check_cost(looked_at, count_max)
    return RangeBelow(witnesses, is_whole=True)


def check_cost(looked_at: int, count_max: int) -> None:
    """Raise `RangeTooCostly` when more keys of a range were looked at than are allowed."""
    if looked_at > count_max:
        message = (
            f"{looked_at} deleted or expired keys of the range were looked at, and "
            f"compare_count_max is {count_max}: compare a smaller range"
        )
        raise RangeTooCostly(message)
