"""What a watch tells: commits, and how far everything was told."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shalekv.v1 import kv_pb2
from shalekv_client.results import Entry, entries_of, known

# What an event holds beside keys and values, and what a change does, about.
EVENT_OVERHEAD_BYTES = 200
CHANGE_OVERHEAD_BYTES = 300


class ChangeKind(enum.Enum):
    """What happened to a key. The numbers are the wire's."""

    PUT = 1
    DELETE = 2
    DELETE_RANGE = 3  # to all keys of a range
    EXPIRED = 4  # the value was hidden since `expire_at_ms`, and is removed now


@dataclass(frozen=True, slots=True)
class WatchChange:
    """One change of a commit."""

    kind: ChangeKind | None  # None: one unknown to this client
    key: bytes  # of a range delete: the first
    value: bytes = b""  # of a put
    expire_at_ms: int | None = None  # when the value expires, or has expired; None: never
    end: bytes = b""  # of a range delete: the first key after it; empty: to the last of all
    previous: Entry | None = None  # the value before, if it was asked for and there was one
    previous_unknown: bool = False  # it was asked for, and nobody knows whether there was one

    @property
    def size_bytes(self) -> int:
        """Memory that it holds, about."""
        before = self.previous
        before_bytes = len(before.key) + len(before.value) if before is not None else 0
        own_bytes = len(self.key) + len(self.value) + len(self.end)
        return CHANGE_OVERHEAD_BYTES + own_bytes + before_bytes


@dataclass(frozen=True, slots=True)
class WatchCommit:
    """One commit: all of its changes inside the range, by key, deletes of ranges first."""

    seq: int
    wal_id: int  # the WAL object that holds it
    changes: tuple[WatchChange, ...]

    @property
    def size_bytes(self) -> int:
        """Memory that it holds, about."""
        return EVENT_OVERHEAD_BYTES + sum(change.size_bytes for change in self.changes)


@dataclass(frozen=True, slots=True)
class WatchProgress:
    """Every commit up to this sequence number was told."""

    seq: int

    @property
    def size_bytes(self) -> int:
        """Memory that it holds, about."""
        return EVENT_OVERHEAD_BYTES


WatchEvent: TypeAlias = WatchCommit | WatchProgress


def changes_of(changes: Iterable[kv_pb2.WatchChange]) -> list[WatchChange]:
    """The changes of one message."""
    return [_change(change) for change in changes]


def _change(change: kv_pb2.WatchChange) -> WatchChange:
    entry, before = change.entry, change.previous
    previous = None
    if change.HasField("previous"):
        (previous,) = entries_of([before])
    return WatchChange(
        kind=known(ChangeKind, change.kind),
        key=entry.key,
        value=entry.value,
        expire_at_ms=entry.expire_at_ms or None,
        end=change.end,
        previous=previous,
        previous_unknown=change.previous_unknown,
    )
