"""The model: acknowledged commits, and the contents that a state of the database must have.

A state is named by a sequence number, and holds the effect of all commits up to that (I1, I2, I9).
A test does not know the clock of the database to the millisecond, so the expiry of a value, and the
time of a read, are intervals.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shalekv.protocol.entry import KeyRange

SHOWN_BYTES = 12  # of a value in the text of a violation


class Violation(AssertionError):
    """The database has broken a promise."""


class Between(NamedTuple):
    """A moment that is not known better, in milliseconds."""

    first_ms: float
    last_ms: float

    def later(self, by_ms: float) -> Between:
        return Between(self.first_ms + by_ms, self.last_ms + by_ms)


class SeenValue(NamedTuple):
    """A value as the database shows it."""

    value: bytes
    seq: int

    def __repr__(self) -> str:
        return f"{self.value[:SHOWN_BYTES]!r} of {self.seq}"


@dataclass(frozen=True, slots=True)
class Put:
    """A key got a value."""

    key: bytes
    value: bytes
    expires: Between | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """A key was deleted."""

    key: bytes


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """All keys of a range were deleted."""

    keys: KeyRange


Effect: TypeAlias = Put | Delete | DeleteRange


class _Held(NamedTuple):
    seen: SeenValue
    expires: Between | None


class State:
    """Contents of the database after some commits, expired values included."""

    def __init__(self) -> None:
        self.seq = 0
        self._held: dict[bytes, _Held] = {}
        self._keys: list[bytes] = []
        self._history: dict[bytes, list[str]] = {}  # for the text of a violation

    def apply(self, seq: int, effects: Iterable[Effect]) -> None:
        """One commit more, whose effects come in their order."""
        self.seq = seq
        for effect in effects:
            match effect:
                case Put(key, value, expires):
                    self._note(key, f"put {seq}")
                    if key not in self._held:
                        insort(self._keys, key)
                    self._held[key] = _Held(SeenValue(value, seq), expires)
                case Delete(key):
                    self._note(key, f"deleted {seq}")
                    self._drop([key] if key in self._held else [])
                case DeleteRange(keys):
                    for key in self.keys_in(keys):
                        self._note(key, f"range deleted {seq}")
                    self._drop(self.keys_in(keys))

    def keys_in(self, keys: KeyRange) -> list[bytes]:
        """The keys of a range that have or had a value."""
        low = bisect_left(self._keys, keys.start)
        high = bisect_left(self._keys, keys.end) if keys.end else len(self._keys)
        return self._keys[low:high]

    def find(self, key: bytes, now: Between) -> tuple[SeenValue | None, ...]:
        """Return the possible replies to a read of this key at that time: one, or two."""
        held = self._held.get(key)
        if held is None:
            return (None,)
        if held.expires is None or now.last_ms < held.expires.first_ms:
            return (held.seen,)
        if now.first_ms > held.expires.last_ms:
            return (None,)
        return (held.seen, None)

    def check_range(self, keys: KeyRange, now: Between, seen: Mapping[bytes, SeenValue]) -> None:
        """Judge the reply to a read of a range. Raises `Violation`."""
        for key in sorted({*self.keys_in(keys), *seen}):
            self.check_key(key, now, seen.get(key))

    def check_key(self, key: bytes, now: Between, seen: SeenValue | None) -> None:
        """Judge the reply to a read of a key. Raises `Violation`."""
        expected = self.find(key, now)
        if seen not in expected:
            since = ", ".join(self._history.get(key, ())[-4:])
            raise Violation(f"{key!r} at {self.seq}: {seen}, expected {expected}; {since}")

    def _note(self, key: bytes, what: str) -> None:
        self._history.setdefault(key, []).append(what)

    def _drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del self._held[key]
            del self._keys[bisect_left(self._keys, key)]


@dataclass(slots=True)
class Commits:
    """All commits that were acknowledged, in any order."""

    _by_seq: dict[int, tuple[Effect, ...]] = field(default_factory=dict)

    def add(self, seq: int, effects: Iterable[Effect]) -> None:
        """One commit. Raises `Violation` when its number was issued before (I5)."""
        if seq in self._by_seq:
            raise Violation(f"the sequence number {seq} was issued twice")
        self._by_seq[seq] = tuple(effects)

    def __len__(self) -> int:
        return len(self._by_seq)

    @property
    def last_seq(self) -> int:
        return max(self._by_seq, default=0)

    def states(self, seqs: Iterable[int]) -> Iterator[State]:
        """The states with these numbers, in ascending order; each is good until the next one."""
        commits = iter(sorted(self._by_seq.items()))
        waiting = next(commits, None)
        state = State()
        for seq in sorted(seqs):
            while waiting is not None and waiting[0] <= seq:
                state.apply(*waiting)
                waiting = next(commits, None)
            yield state


ALL_KEYS = KeyRange(b"", b"")


class Row(NamedTuple):
    """An entry of a scan, to the byte."""

    key: bytes
    value: bytes
    seq: int
    expire_at_ms: int | None


@dataclass(slots=True)
class SeenView:
    """An open view, and the contents that it showed first."""

    seq: int
    now: Between
    rows: Sequence[Row]  # in the order of the scan
    keys: KeyRange = ALL_KEYS
    reads: int = 1

    def read_again(self, rows: Sequence[Row], *, first: int = 0) -> None:
        """It was read once more, from its row number `first` on. Raises `Violation` (I7)."""
        self.reads += 1
        before = self.rows[first:]
        if list(rows) == list(before):
            return
        if len(rows) < len(before) and list(rows) == list(before[: len(rows)]):
            problem = f"ends after {len(rows)} of {len(before)} rows"
        else:
            pairs = zip(rows, before, strict=False)
            other = next((pair for pair in pairs if pair[0] != pair[1]), (len(rows), len(before)))
            problem = f"differs: {other[0]}, and before {other[1]}"
        raise Violation(f"view {self.seq}, read {self.reads}: {problem}")


@dataclass(slots=True)
class SeenViews:
    """All that was read of a database."""

    commits: Commits
    views: list[SeenView] = field(default_factory=list)

    def check(self) -> None:
        """Judge all views by the model. REQUIRES: every commit that they can hold was added.

        Raises `Violation`.
        """
        ordered = sorted(self.views, key=lambda view: view.seq)
        states = self.commits.states(view.seq for view in ordered)
        for view, state in zip(ordered, states, strict=True):
            keys = [row.key for row in view.rows]
            if sorted({*keys}) != sorted(keys):
                raise Violation(f"view {view.seq}: a key stands there twice")
            if keys not in (sorted(keys), sorted(keys, reverse=True)):
                raise Violation(f"view {view.seq}: its keys are not in order")
            seen = {row.key: SeenValue(row.value, row.seq) for row in view.rows}
            state.check_range(view.keys, view.now, seen)
