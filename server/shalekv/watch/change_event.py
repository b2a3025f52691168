"""Change events: commits as a watch reports them, with only the changes inside its range."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shalekv.protocol.entry import Entry
from shalekv.protocol.loads import CommittedLoad
from shalekv.read.version import PinnedVersion

COMMIT_OVERHEAD_BYTES = 400  # for each queued commit: Python objects, slots, the reply header
CHANGE_OVERHEAD_BYTES = 40  # for each change: slots, tags and lengths


@dataclass(frozen=True, slots=True)
class AppliedObject:
    """The contents of a WAL object for watches: all versions, without the system's records."""

    wal_id: int
    max_seq: int
    points: Sequence[Entry] = ()  # by key, then newest first
    range_tombstones: Sequence[Entry] = ()  # in the same order
    load: CommittedLoad | None = None  # if set, the object holds nothing else


class Unresolved(enum.Enum):
    """The reason for which a change event does not hold the previous value of a key."""

    UNREAD = 1  # the levels have to be read: they may hold it
    UNKNOWN = 2  # it cannot be determined any more


Previous: TypeAlias = "Entry | Unresolved | None"  # None: the key had no version before


@dataclass(slots=True, eq=False)
class ChangeEvent:
    """One commit, or a part of it, shared by all watches with the same range."""

    seq: int
    wal_id: int
    changes: Sequence[Entry]  # range deletes first, clipped to the range; both kinds by key
    previous: list[Previous] | None = None  # one for each change; None: not requested
    pinned: PinnedVersion | None = None  # the levels to read for what is `UNREAD`
    more: bool = False  # another part of the commit follows
    size_bytes: int = field(init=False)
    encoded: bytes | None = None  # the encoded commit, cached by its first use

    def __post_init__(self) -> None:
        """Compute the size once, for all watches that share the event."""
        self.size_bytes = COMMIT_OVERHEAD_BYTES + changes_bytes(self.changes)
        for previous in self.previous or ():
            if isinstance(previous, Entry):
                self.size_bytes += len(previous.value)


def changes_bytes(changes: Sequence[Entry]) -> int:
    """Return the memory that changes take while they are queued, in bytes."""
    keys_bytes = sum([len(entry.key) for entry in changes])
    values_bytes = sum([len(entry.value) for entry in changes])
    return keys_bytes + values_bytes + CHANGE_OVERHEAD_BYTES * len(changes)
