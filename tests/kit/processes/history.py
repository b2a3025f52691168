"""History of the writes that clients sent, kept apart from the server, and its checks.

A write ends as acknowledged, as refused (the server says that nothing was applied), or as unknown.
Each put carries the number of its attempt, which all members of a batch share, so that each value
in the database identifies its attempt.

`check_state` judges what a server shows after it has recovered. That state is then settled: a value
that was overwritten, deleted or lost by then must never show again. `check_order` judges each
acknowledgement as it arrives.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from shalekv_client import Commit

PADDING_BYTES_MAX = 200


class Found(NamedTuple):
    """A value as a server shows it."""

    value: bytes
    seq: int


class Fate(enum.Enum):
    """Outcome of a write as its client knows it."""

    UNKNOWN = "unknown"  # also while it is under way
    IN_MEMORY = "acknowledged from memory"  # a crash may still lose it
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"


OPEN = (Fate.UNKNOWN, Fate.IN_MEMORY)  # it may be there or not


class Violation(AssertionError):
    """The database has broken a promise."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One write that was sent: a value for each key, None for a delete."""

    number: int
    changes: Mapping[bytes, bytes | None]
    seq_floor: int  # the greatest sequence number that anybody knew when it was sent
    fate: Fate = Fate.UNKNOWN
    commit: Commit | None = None
    problem: str = ""

    @property
    def seq(self) -> int:
        """The sequence number that was shown for it; 0 when none was."""
        return 0 if self.commit is None else self.commit.seq

    def __str__(self) -> str:
        keys = ", ".join(repr(key) for key in self.changes)
        return f"attempt {self.number} on {keys} ({self.fate.value} {self.problem}, seq {self.seq})"


@dataclass(slots=True)
class _KeyLog:
    """The possible values of one key since its state was last settled."""

    settled: Found | None = None
    attempts: list[Attempt] = field(default_factory=list)


class History:
    """All writes of a test, from all of its clients to all of its servers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.attempts: list[Attempt] = []
        self._random = Random(f"{seed}/values")
        self._newest_seq = 0
        self._seqs: set[int] = set()
        self._keys: dict[bytes, _KeyLog] = defaultdict(_KeyLog)

    def begin(self, puts: Iterable[bytes], deletes: Iterable[bytes] = ()) -> Attempt:
        number = len(self.attempts)
        value = self._value(number)
        changes: dict[bytes, bytes | None] = dict.fromkeys(puts, value)
        changes |= dict.fromkeys(deletes)
        attempt = Attempt(number, changes, self._newest_seq)
        self.attempts.append(attempt)
        for key in changes:
            self._keys[key].attempts.append(attempt)
        return attempt

    def acknowledged(self, attempt: Attempt, commit: Commit) -> None:
        """Record an acknowledgement. Raises `Violation` if its number contradicts the order.

        A write that is sent after another was acknowledged comes after it, whichever writer
        acknowledged (I3, I14): a fenced writer can make nothing durable that was sent after its
        successor acknowledged something. It can acknowledge from memory until it notices; those
        writes are lost.
        """
        attempt.commit = commit
        attempt.fate = Fate.IN_MEMORY if commit.wal_id is None else Fate.ACKNOWLEDGED
        if commit.seq in self._seqs:
            raise self.violation(f"{attempt}: its number was issued before")
        if commit.seq <= attempt.seq_floor and commit.wal_id is not None:
            raise self.violation(f"{attempt}: {attempt.seq_floor} was acknowledged before it began")
        self._seqs.add(commit.seq)
        self._newest_seq = max(self._newest_seq, commit.seq)

    def refused(self, attempt: Attempt, problem: str) -> None:
        attempt.fate, attempt.problem = Fate.REFUSED, problem

    def lost_sight(self, attempt: Attempt, problem: str) -> None:
        attempt.problem = problem

    def of_fate(self, fate: Fate) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.fate is fate]

    def check_state(self, state: Mapping[bytes, Found]) -> None:
        """Judge the whole state of a database, and settle it; raises `Violation`."""
        for key in self._keys.keys() | state.keys():
            self._check_key(key, state.get(key))
        for attempt in self._open_batches():
            self._check_batch(attempt, state)
        self._keys = defaultdict(_KeyLog, {key: _KeyLog(found) for key, found in state.items()})

    def violation(self, problem: str) -> Violation:
        return Violation(f"seed {self.seed}: {problem}")

    def _value(self, number: int) -> bytes:
        padding = self._random.randrange(PADDING_BYTES_MAX)
        return b"%d:%s" % (number, b"." * padding)

    def _check_key(self, key: bytes, found: Found | None) -> None:
        key_log = self._keys[key]
        newest = max(
            (a for a in key_log.attempts if a.fate is Fate.ACKNOWLEDGED),
            key=lambda attempt: attempt.seq,
            default=None,
        )
        if newest is None:
            expected = key_log.settled
        else:
            value = newest.changes[key]
            expected = None if value is None else Found(value, newest.seq)
        if found == expected:
            return
        seq_floor = newest.seq if newest is not None else (expected.seq if expected else 0)
        for attempt in key_log.attempts:
            if attempt.fate not in OPEN:
                continue
            value = attempt.changes[key]
            if found is None and value is None:
                return
            if found is not None and found.value == value and found.seq > seq_floor:
                return
        since = "; ".join(str(attempt) for attempt in key_log.attempts[-5:])
        raise self.violation(f"{key!r} is {found}, expected {expected}; last attempts: {since}")

    def _open_batches(self) -> Iterator[Attempt]:
        """Batches since the last check that may or may not have been applied."""
        seen: dict[int, Attempt] = {}
        for key_log in self._keys.values():
            for attempt in key_log.attempts:
                if attempt.fate in OPEN and len(attempt.changes) > 1:
                    seen[attempt.number] = attempt
        return iter(seen.values())

    def _check_batch(self, batch: Attempt, state: Mapping[bytes, Found]) -> None:
        """If one member of a batch shows, every other shows, or was changed after it."""
        shown = {
            found.seq
            for key, value in batch.changes.items()
            if (found := state.get(key)) is not None and found.value == value
        }
        if not shown:
            return
        if len(shown) > 1:
            raise self.violation(f"{batch} shows under several numbers: {sorted(shown)}")
        batch_seq = shown.pop()
        for key in batch.changes:
            found = state.get(key)
            if found is None:
                is_whole = any(
                    attempt.changes[key] is None
                    and attempt.fate is not Fate.REFUSED
                    and (attempt.fate in OPEN or attempt.seq > batch_seq)
                    for attempt in self._keys[key].attempts
                )
            else:
                is_whole = found.seq >= batch_seq
            if not is_whole:
                raise self.violation(f"half a batch: {batch}, and {key!r} is {found}")
