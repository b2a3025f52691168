"""Commits as a watch sees them: the changes inside its range."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shalekv.protocol.entry import Entry
from shalekv.protocol.loads import CommittedLoad
from shalekv.read.version import PinnedVersion

COMMIT_OVERHEAD_BYTES = 400  # of a commit that waits to be taken: objects and slots, its header
CHANGE_OVERHEAD_BYTES = 40  # of a change: slots, tags and lengths


@dataclass(frozen=True, slots=True)
class AppliedObject:
    """What a WAL object holds for those who watch: all versions, none of the system's records."""

    wal_id: int
    max_seq: int
    points: Sequence[Entry] = ()  # by key, and then newest first
    range_tombstones: Sequence[Entry] = ()  # likewise
    load: CommittedLoad | None = None  # then there is nothing else


class Lack(enum.Enum):
    """Why a value before a change is not there."""

    UNREAD = 1  # it is in the levels, if there is one
    UNKNOWN = 2  # nobody knows any more


Previous: TypeAlias = "Entry | Lack | None"  # None: there was none


@dataclass(slots=True, eq=False)
class ChangeEvent:
    """One commit, or a part of it, shared by all watches with the same range."""

    seq: int
    wal_id: int
    changes: Sequence[Entry]  # range deletes first, clipped to the range; each by key
    previous: list[Previous] | None = None  # of each change; None: nobody asked
    held: PinnedVersion | None = None  # where to look for what was not read
    more: bool = False  # another part follows
    size_bytes: int = field(init=False)
    encoded: bytes | None = None  # kept by whoever was the first to need it

    def __post_init__(self) -> None:
        """Counted once, for all watches that are told."""
        self.size_bytes = COMMIT_OVERHEAD_BYTES + changes_bytes(self.changes)
        for previous in self.previous or ():
            if isinstance(previous, Entry):
                self.size_bytes += len(previous.value)


def changes_bytes(changes: Sequence[Entry]) -> int:
    """What changes take while they wait to be taken."""
    keys_bytes = sum([len(entry.key) for entry in changes])
    values_bytes = sum([len(entry.value) for entry in changes])
    return keys_bytes + values_bytes + CHANGE_OVERHEAD_BYTES * len(changes)
