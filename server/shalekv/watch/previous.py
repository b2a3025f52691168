"""Previous values of changed keys: from the same WAL object, or from the state before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shalekv.errors import StoreError
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, Kind
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.watch.change_event import AppliedObject, ChangeEvent, Previous, Unresolved

ENTRY_BYTES = 320  # overhead of a remembered entry, in addition to its key and value


class PriorState(Protocol):
    """The state of the database before a WAL object."""

    @property
    def pinned(self) -> PinnedVersion | None:
        """The levels to read for what is `UNREAD`."""
        ...

    def previous(self, key: bytes) -> Previous:
        """Return the newest version of `key` in this state."""
        ...


class ViewBefore:
    """The state before a WAL object, taken from the read view of that moment."""

    def __init__(self, view: ReadView) -> None:
        """`view` is that of the prefix just before the object was applied."""
        self._view = view
        self.pinned = view.pinned

    def previous(self, key: bytes) -> Previous:
        """Return the newest version of `key`, as far as memory determines it; reads nothing."""
        found = self._view.get(key)
        pinned = self.pinned
        if pinned is None:
            return found
        # A delete that the levels hold as well: memory may have dropped a newer put already.
        is_stale = (
            found is not None
            and found.kind is not Kind.PUT
            and found.seq <= pinned.version.last_seq
        )
        if found is not None and not is_stale:
            return found
        return Unresolved.UNREAD if pinned.may_hold(key) else None


class ReplayedState:
    """The state before a WAL object, made by replaying the objects before that.

    Keys that were not replayed are read from a version of the levels, the base, if every object
    after the base was replayed. Otherwise their previous values are unknown.
    """

    def __init__(self, base: PinnedVersion | None, *, size_bytes_max: int) -> None:
        """`base` is not read before `use_base` was called.

        When the replayed entries take more than `size_bytes_max` bytes, they and `base` are
        dropped: previous values are unknown from then on, except those replayed later.
        """
        self._base = base
        self._known: dict[bytes, Entry] = {}
        self._tombstones = NO_RANGE_TOMBSTONES
        self._size_bytes = 0
        self._size_bytes_max = size_bytes_max
        self._pending: list[Entry] = []
        self._pending_bytes = 0
        self.pinned: PinnedVersion | None = None

    def use_base(self) -> None:
        """Read keys that were not replayed from the base from now on.

        REQUIRES: the replay has reached the end of the base, and began at or before it.
        """
        self.pinned, self._base = self._base, None

    def previous(self, key: bytes) -> Previous:
        """Return the newest version of `key`."""
        found = self._tombstones.latest(key, self._known.get(key))
        if found is not None:
            return found
        if self.pinned is None:
            return Unresolved.UNKNOWN
        return Unresolved.UNREAD if self.pinned.may_hold(key) else None

    def add(self, changes: Iterable[Entry]) -> None:
        """Replay the changes of the next commit, range deletes first."""
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
        """Replay the changes when `add_pending` is called.

        Until then the same commit is published to other watches, which need the state before it.
        """
        self._pending_bytes += sum([ENTRY_BYTES + len(e.key) + len(e.value) for e in changes])
        if self._pending_bytes <= self._size_bytes_max:
            self._pending += changes
        else:
            self._pending.clear()

    def add_pending(self) -> None:
        """Replay what `add_later` has collected: the commit is published to all watches."""
        if self._pending_bytes > self._size_bytes_max:
            self._forget()
        self.add(self._pending)
        self._pending, self._pending_bytes = [], 0

    def _forget(self) -> None:
        self._known, self._tombstones, self._size_bytes = {}, NO_RANGE_TOMBSTONES, 0
        self._base = self.pinned = None


class ObjectPriorValues:
    """The previous values for the changes of one WAL object: from itself, else from `prior`."""

    def __init__(self, obj: AppliedObject, prior: PriorState) -> None:
        """`prior` is the state before the object."""
        self._points = obj.points
        self._tombstones = obj.range_tombstones
        self._prior = prior

    def previous(self, at: int) -> Previous:
        """Return the previous value of the key that point `at` of the object changes."""
        entry = self._points[at]
        older: Entry | None = None
        if at + 1 < len(self._points) and self._points[at + 1].key == entry.key:
            older = self._points[at + 1]
        if self._deleted_seq(entry) > (0 if older is None else older.seq):
            return None
        return older if older is not None else self._prior.previous(entry.key)

    def _deleted_seq(self, entry: Entry) -> int:
        """Return the last range delete before `entry` that contains its key; 0: there is none."""
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


async def read_previous(events: Sequence[ChangeEvent]) -> None:
    """Read from the levels the previous values of these events that are `UNREAD`.

    Values that cannot be read any more become `UNKNOWN`. Raises `CorruptObject`.
    """
    wanted: dict[PinnedVersion, set[bytes]] = {}
    for event in events:
        if event.pinned is not None:
            wanted.setdefault(event.pinned, set()).update(_unread_keys(event))
    found: dict[PinnedVersion, dict[bytes, Entry] | None] = {}
    for pinned, keys in wanted.items():
        try:
            found[pinned] = await pinned.find_many([*keys])
        except StoreError:
            found[pinned] = None
    for event in events:
        if event.pinned is not None:
            _fill(event, found.get(event.pinned))


def _unread_keys(event: ChangeEvent) -> list[bytes]:
    pairs = zip(event.changes, event.previous or (), strict=True)
    return [entry.key for entry, previous in pairs if previous is Unresolved.UNREAD]


def _fill(event: ChangeEvent, found: dict[bytes, Entry] | None) -> None:
    """Set the values that were `UNREAD`; `found` is None if the levels could not be read."""
    event.previous = [
        (Unresolved.UNKNOWN if found is None else found.get(entry.key))
        if previous is Unresolved.UNREAD
        else previous
        for entry, previous in zip(event.changes, event.previous or (), strict=True)
    ]
    event.pinned = None
