"""Commits and groups of commits: what travels through the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from shalekv.core.entry import NO_EXPIRY, Entry, Kind
from shalekv.engine.sorted_runs import ENTRY_OVERHEAD_BYTES, Run
from shalekv.errors import OutcomeUnknown, ShaleError

# What a commit takes beside its entries until it is durable, measured: itself, the reply that is
# waited for, and what completes it.
COMMIT_OVERHEAD_BYTES = 1_200
_KEY = itemgetter(0)  # of an Entry
_new = tuple.__new__  # what `Entry()` calls in the end, at half the cost


class Change(NamedTuple):
    """What a commit does to one key."""

    key: bytes
    kind: Kind
    value: bytes = b""
    expire_at_ms: int = NO_EXPIRY


@dataclass(frozen=True, slots=True)
class Receipt:
    """A commit that is durable."""

    seq: int
    wal_id: int


def outcome_unknown() -> OutcomeUnknown:
    """What is told of a commit that was sent, and of which nobody knows more."""
    return OutcomeUnknown(
        "the writer stopped while the object store had not answered: the write may be applied or "
        "not. Read the key to find out, or write it again"
    )


Settled: TypeAlias = Callable[[Receipt | ShaleError], None]


class Commit:
    """Changes that become durable together, under one sequence number.

    The sequence number may be raised while the commit is not durable, when another writer's fence
    took the slot that it was meant for. Its place among all commits of this writer stays.
    """

    __slots__ = ("entries", "place", "seq", "settle", "size_bytes")

    def __init__(self, changes: Iterable[Change], seq: int, settle: Settled) -> None:
        """REQUIRES: each key stands once in `changes`.

        `settle` is called exactly once, from within the log: it must neither raise nor write.
        """
        self.entries = [
            _new(Entry, (key, seq, kind, value, expire_at_ms))
            for key, kind, value, expire_at_ms in changes
        ]
        self.seq = seq
        self.place = seq
        self.size_bytes = changes_bytes(self.entries)
        self.settle = settle

    def resequence(self, seq: int) -> None:
        """Move the commit behind everything that has a lower number."""
        self.seq = seq
        self.entries = [entry._replace(seq=seq) for entry in self.entries]


def changes_bytes(changes: Sequence[Change] | Sequence[Entry]) -> int:
    """The memory that a commit with these changes is accounted with until it is durable, bytes."""
    keys_bytes = sum([len(change.key) for change in changes])
    values_bytes = sum([len(change.value) for change in changes])
    return COMMIT_OVERHEAD_BYTES + keys_bytes + values_bytes + ENTRY_OVERHEAD_BYTES * len(changes)


class Group:
    """The commits of one WAL object."""

    __slots__ = ("commits", "landed", "run", "size_bytes", "wal_id")

    def __init__(self, wal_id: int, commits: Sequence[Commit]) -> None:
        """REQUIRES: `commits` in the order of their sequence numbers."""
        self.wal_id = wal_id
        self.commits = commits
        self.size_bytes = sum(commit.size_bytes for commit in commits)
        newest = {entry.key: entry for commit in commits for entry in commit.entries}
        self.run = Run.from_newest(newest)
        self.landed: bool | None = None  # None: not known yet

    @property
    def max_seq(self) -> int:
        """The sequence number of its last commit."""
        return self.commits[-1].seq

    def sst_entries(self) -> list[Entry]:
        """All versions, by key and then newest first: the order of an SST."""
        entries = [entry for commit in reversed(self.commits) for entry in commit.entries]
        if len(entries) == len(self.run.entries):  # no key stands here twice
            return list(self.run.entries)
        entries.sort(key=_KEY)  # stable: versions of one key stay newest first
        return entries
