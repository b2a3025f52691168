"""The value before a change: from the same WAL object, or from the state before that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shalekv.errors import StoreError
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.range_tombstones import NONE
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.watch.change_event import AppliedObject, ChangeEvent, Lack, Previous

ENTRY_BYTES = 320  # of an entry that is remembered, beside its bytes


class Outside(Protocol):
    """The state before a WAL object."""

    @property
    def held(self) -> PinnedVersion | None:
        """Where to look for what is `UNREAD`."""
        ...

    def previous(self, key: bytes) -> Previous:
        """The newest version of `key` in it."""
        ...


class Before:
    """The state before a WAL object, by the view of that moment."""

    def __init__(self, view: ReadView) -> None:
        """Of the prefix as it was."""
        self._view = view
        self.held = view.held

    def previous(self, key: bytes) -> Previous:
        """The newest version of `key`, as far as it can be told without reading anything."""
        found = self._view.get(key)
        held = self.held
        if held is None:
            return found
        # A range delete that is in the levels as well: memory may have let go of a newer put.
        is_stale = (
            found is not None and found.kind is not Kind.PUT and found.seq <= held.tree.last_seq
        )
        if found is not None and not is_stale:
            return found
        return Lack.UNREAD if held.may_hold(key) else None


class Met:
    """The state before a WAL object, as far as it follows from what was read so far.

    What was never met is in the tree, if all was read that comes after the tree.
    """

    def __init__(self, base: PinnedVersion | None, *, size_bytes_max: int) -> None:
        """`base` is not asked before `rest_on_base` was called.

        When what was met takes more than `size_bytes_max`, it is forgotten.
        """
        self._base = base
        self._known: dict[bytes, Entry] = {}
        self._tombstones = NONE
        self._size_bytes = 0
        self._size_bytes_max = size_bytes_max
        self._later: list[Entry] = []
        self._later_bytes = 0
        self.held: PinnedVersion | None = None

    def rest_on_base(self) -> None:
        """What was read begins before the end of the tree, and now goes on behind it."""
        self.held, self._base = self._base, None

    def previous(self, key: bytes) -> Previous:
        """The newest version of `key`."""
        found = self._tombstones.latest(key, self._known.get(key))
        if found is not None:
            return found
        if self.held is None:
            return Lack.UNKNOWN
        return Lack.UNREAD if self.held.may_hold(key) else None

    def add(self, changes: Iterable[Entry]) -> None:
        """Changes of the next commit were met, range deletes first."""
        tombstones = []
        for entry in changes:
            if entry.kind is Kind.RANGE_TOMBSTONE:
                tombstones.append(entry)
                continue
            old = self._known.get(entry.key)
            if old is None:
                self._size_bytes += ENTRY_BYTES + len(entry.key) + len(entry.value)
            else:
                self._size_bytes += len(entry.value) - len(old.value)
            self._known[entry.key] = entry
        if tombstones:
            self._tombstones = self._tombstones.with_added(tombstones)
        if self._size_bytes + self._tombstones.size_bytes > self._size_bytes_max:
            self._forget()

    def add_later(self, changes: Sequence[Entry]) -> None:
        """As `add`, when `land` is called: others are to be told of the same commit."""
        self._later_bytes += sum([ENTRY_BYTES + len(e.key) + len(e.value) for e in changes])
        if self._later_bytes <= self._size_bytes_max:
            self._later += changes
        else:
            self._later.clear()

    def land(self) -> None:
        """All are told of what was to be added later."""
        if self._later_bytes > self._size_bytes_max:
            self._forget()
        self.add(self._later)
        self._later, self._later_bytes = [], 0

    def _forget(self) -> None:
        self._known, self._tombstones, self._size_bytes = {}, NONE, 0
        self._base = self.held = None


class Inside:
    """What one WAL object tells of the values before its changes; the rest is outside of it."""

    def __init__(self, obj: AppliedObject, outside: Outside) -> None:
        """`outside` is the state before the object."""
        self._points = obj.points
        self._tombstones = obj.range_tombstones
        self._outside = outside

    def previous(self, at: int) -> Previous:
        """What was there before point `at` of the object."""
        entry = self._points[at]
        older: Entry | None = None
        if at + 1 < len(self._points) and self._points[at + 1].key == entry.key:
            older = self._points[at + 1]
        if self._deleted_seq(entry) > (0 if older is None else older.seq):
            return None
        return older if older is not None else self._outside.previous(entry.key)

    def _deleted_seq(self, entry: Entry) -> int:
        """The last range delete before `entry` that contains its key; 0: there is none."""
        return max(
            (
                tombstone.seq
                for tombstone in self._tombstones
                if tombstone.seq < entry.seq
                and tombstone.key <= entry.key
                and (not tombstone.value or entry.key < tombstone.value)
            ),
            default=0,
        )


async def look_up(commits: Sequence[ChangeEvent]) -> None:
    """Read what of the values before these commits stands in the levels.

    Where it cannot be read any more, nobody knows it. Raises `CorruptObject`.
    """
    wanted: dict[PinnedVersion, set[bytes]] = {}
    for commit in commits:
        if commit.held is not None:
            wanted.setdefault(commit.held, set()).update(_unread(commit))
    found: dict[PinnedVersion, dict[bytes, Entry] | None] = {}
    for held, keys in wanted.items():
        try:
            found[held] = await held.find_many([*keys])
        except StoreError:
            found[held] = None
    for commit in commits:
        if commit.held is not None:
            _fill(commit, found.get(commit.held))


def _unread(commit: ChangeEvent) -> list[bytes]:
    pairs = zip(commit.changes, commit.previous or (), strict=True)
    return [entry.key for entry, previous in pairs if previous is Lack.UNREAD]


def _fill(commit: ChangeEvent, found: dict[bytes, Entry] | None) -> None:
    """Put in what was found; None: it could not be read."""
    commit.previous = [
        (Lack.UNKNOWN if found is None else found.get(entry.key))
        if previous is Lack.UNREAD
        else previous
        for entry, previous in zip(commit.changes, commit.previous or (), strict=True)
    ]
    commit.held = None
