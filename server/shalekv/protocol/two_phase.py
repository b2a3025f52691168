"""Two-phase compare-and-swap: creating an object once in a store without conditional writes. Pure.

A record in a transactional store decides which attempt creates an object. Each attempt has a
temporary object, its `source`. The record of a destination decides as follows on an attempt, and on
the deletion of its source by a collector (server/docs/protocol.md, "Objects"):

    record        SourceStatus   the attempt                     the deletion of `source`
    ------------- -------------- ------------------------------- --------------------------------
    none          FREE           inserts one                     inserts one that excludes it
    ours, open    OURS           copies, commits, deletes        completes it, and deletes
    ours, done    OURS_DONE      has succeeded                   deletes
    theirs, open  THEIRS         completes theirs, and has lost  completes theirs, and deletes
    theirs, done  THEIRS_DONE    has lost                        deletes

An open record is *dead* if its source and its destination are both gone: it cannot be completed,
and another attempt takes it over. A copy is not conditional, and may take effect long after it was
sent. If the record was taken over meanwhile, it would overwrite the object of another attempt. So
this rule holds (server/docs/decisions/0021-two-phase.md):

    S   No source is deleted while a process may be copying it, as long as its destination matters.
        A process that deletes a source first sees a record that excludes the source: one that is
        done, or that names a source which was drawn since. And an attempt has one chance to enter
        its source: an insert if there is no record, or a take-over of a dead one that it had read
        before it put the source. So a later attempt to enter it fails, and an earlier one is seen.

A record that is done is removed after its object was collected. Objects that are created, copied or
deleted under such a name later do not count (F1 to F3).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Destination:
    """An object to create, identified in the same way by all processes."""

    database: str  # the URL of the store, without credentials
    name: str

    def __str__(self) -> str:
        """Return the URL of the object, which is the key of its record."""
        return f"{self.database}/{self.name}"


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """The record that the attempt with the temporary object `source` creates `destination`.

    Once `is_committed`, the destination exists, and the source is not needed any more.
    """

    destination: Destination
    source: str  # a name in the same database, which no other attempt ever uses
    is_committed: bool = False


class SourceStatus(enum.Enum):
    """The status of a source by the record of its destination: see the table of this module."""

    FREE = "no record"
    OURS = "ours, to be completed"
    OURS_DONE = "ours, committed"
    THEIRS = "another's, to be completed"
    THEIRS_DONE = "another's, committed"


def source_status(record: CreateRecord | None, source: str) -> SourceStatus:
    """Return the status of `source` by the record of its destination (None: there is none)."""
    if record is None:
        return SourceStatus.FREE
    if record.source == source:
        return SourceStatus.OURS_DONE if record.is_committed else SourceStatus.OURS
    return SourceStatus.THEIRS_DONE if record.is_committed else SourceStatus.THEIRS
