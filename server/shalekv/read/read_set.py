"""The read set of a write: what the levels hold of the keys that the write depends on.

A transaction is decided synchronously, from memory; so what it may need from the levels is fetched
before. All answers come from one `Version`. As long as the memtable holds everything that came
after that version, the transaction can be decided again by the same answers (see `VersionSet`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shalekv.errors import RangeTooCostly
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.read.scan import Merge
from shalekv.read.version import ReadView

# Keys with a value that are fetched from a range which must be empty. One would do, unless the
# transaction is decided again and finds it deleted.
WITNESS_COUNT = 8
# Deleted or expired keys that the comparison of a range examines before it is refused. Nothing else
# runs meanwhile: these take some milliseconds.
COMPARE_COUNT_MAX = 10_000
# Keys of a range, with or without a value, and bytes of keys that are read to count those that a
# range delete removes. The count ends there, and says so.
COUNTED_KEYS_MAX = 10_000
COUNTED_BYTES_MAX = 8 * 1024 * 1024


class VersionToken:
    """Marks a read set as current, or as read from an older version.

    Each `ReadSet` refers to the token of its version. While anything refers to a token, memory
    keeps everything that came after its version (see `MemtablePruner`).
    """

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class RangeInLevels:
    """The first keys of a range that have a value in the levels."""

    entries: Sequence[Entry]
    is_whole: bool  # whether these are all


@dataclass(frozen=True, slots=True)
class ReadSet:
    """The answers of one `Version`. REQUIRES: only what was looked up is asked for."""

    token: VersionToken | None = None  # None: nothing was looked up
    found: Mapping[bytes, Entry] = field(default_factory=dict)
    ranges: Mapping[KeyRange, RangeInLevels] = field(default_factory=dict)
    record: Entry | None = None  # of the idempotency key


EMPTY_READ_SET = ReadSet()


async def range_in_levels(
    levels: ReadView,
    keys: KeyRange,
    *,
    now_ms: int,
    is_shadowed: Callable[[bytes], bool],
    is_hidden: Callable[[bytes], bool],
) -> RangeInLevels:
    """Return the first keys of the range that have a value in the levels, and no entry in memory.

    `levels` is a view without runs. `is_shadowed` says whether memory has a durable entry of a key:
    the levels do not matter for it then. `is_hidden` says whether an entry that is not durable may
    hide the key: such a key is returned, but not counted. The search ends when `WITNESS_COUNT` keys
    are counted. Raises `RangeTooCostly` if more than `COMPARE_COUNT_MAX` keys are examined before.
    """
    witnesses: list[Entry] = []
    seen_count = examined = 0
    merge = Merge(levels, keys, reverse=False)
    while await merge.fetch():
        entries = merge.slice()
        visible = [entry for entry in entries if entry.is_visible(now_ms)]
        left = [entry for entry in visible if not is_shadowed(entry.key)]
        witnesses += left
        seen_count += sum(not is_hidden(entry.key) for entry in left)
        if seen_count >= WITNESS_COUNT:
            return RangeInLevels(witnesses, is_whole=False)
        examined += len(entries)
        check_cost(examined)
    return RangeInLevels(witnesses, is_whole=True)


async def counted_in_levels(levels: ReadView, keys: KeyRange, *, now_ms: int) -> RangeInLevels:
    """Return the keys of the range that have a value in the levels, without their values.

    `levels` is a view without runs. The search ends when more than `COUNTED_KEYS_MAX` keys, or
    `COUNTED_BYTES_MAX` of them, are read.
    """
    found: list[Entry] = []
    examined = examined_bytes = 0
    merge = Merge(levels, keys, reverse=False)
    while await merge.fetch():
        entries = merge.slice()
        found += [entry._replace(value=b"") for entry in entries if entry.is_visible(now_ms)]
        examined += len(entries)
        examined_bytes += sum([len(entry.key) for entry in entries])
        if examined > COUNTED_KEYS_MAX or examined_bytes > COUNTED_BYTES_MAX:
            return RangeInLevels(found, is_whole=False)
        await asyncio.sleep(0)  # other tasks run between two slices
    return RangeInLevels(found, is_whole=True)


def check_cost(examined: int) -> None:
    """Raise `RangeTooCostly` if more keys of a range were examined than are allowed."""
    if examined > COMPARE_COUNT_MAX:
        message = (
            f"{examined} deleted or expired keys of the range were examined, and at most "
            f"{COMPARE_COUNT_MAX} are: compare a smaller range"
        )
        raise RangeTooCostly(message)


class UnpinnedReadSet:
    """Read set of a write that waits for admission; it does not hold its version token.

    A full memtable shrinks only when no older version token is held, so a write that waits for
    the memtable to shrink must not hold one.
    """

    def __init__(self, read_set: ReadSet) -> None:
        """Keep all of `read_set` but its token, which is known as long as others hold it."""
        self._read_set = replace(read_set, token=None)
        self._token = weakref.ref(read_set.token) if read_set.token is not None else None

    def pinned(self) -> ReadSet:
        """Return the read set with its token. If the token is gone, the read set is outdated."""
        return replace(self._read_set, token=self._token() if self._token is not None else None)
