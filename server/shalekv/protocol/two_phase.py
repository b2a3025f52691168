"""Two-phase compare-and-swap as decisions (seed 000, "Two-Phase CAS Protocol"; protocol, 2).

A store without conditional writes decides who creates an object with the help of a record in a
transactional store. What the record of a destination says to an attempt with the temporary object
`source`, and to a collector that wants to delete that:

    record        Standing       the attempt                     the deletion of `source`
    ------------- -------------- ------------------------------- --------------------------------
    none          FREE           inserts one                     inserts one that keeps it out
    ours, open    OURS           copies, commits, deletes        completes it, and deletes
    ours, done    OURS_DONE      is done: the object is there    deletes
    theirs, open  THEIRS         helps, and then has lost        completes theirs, and deletes
    theirs, done  THEIRS_DONE    has lost                        deletes

An open record whose source and destination are both gone is dead: nobody can complete it, and
whoever wants the destination takes it over. A copy is not conditional, and may land long after it
was sent: on what somebody else has put there, if the record was taken over meanwhile. So:

    S   No source is deleted while somebody may be copying it, as long as its destination matters.
        Whoever deletes one first sees a record that keeps it out: one that is done, or that names
        a source which was drawn since. And an attempt has one chance to enter its source: an
        insert if there is no record, or a take-over of a dead one that it had read before it put
        the source. What could still enter it therefore fails, and what has entered it is seen.

A record that is done goes after its object was collected. Whatever is created, copied or deleted
under such a name later is as if it were not (rules F1 to F3 of the protocol, section 3).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Destination:
    """An object that is to be created, whichever process speaks of it."""

    database: str  # the URL of the store, without credentials
    name: str

    def __str__(self) -> str:
        """The URL of the object: what a record is found by."""
        return f"{self.database}/{self.name}"


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """Who creates `destination`: the attempt whose temporary object is `source`.

    `is_committed`: the destination has been made, and the source is not needed any more.
    """

    destination: Destination
    source: str  # a name of the same database, which no other attempt ever uses
    is_committed: bool = False


class SourceStatus(enum.Enum):
    """What the record of a destination says to the owner of a source. See the table above."""

    FREE = "no record"
    OURS = "ours, to be completed"
    OURS_DONE = "ours, committed"
    THEIRS = "another's, to be completed"
    THEIRS_DONE = "another's, committed"


def standing(record: CreateRecord | None, source: str) -> SourceStatus:
    """What `record` says to the owner of `source`."""
    if record is None:
        return SourceStatus.FREE
    if record.source == source:
        return SourceStatus.OURS_DONE if record.is_committed else SourceStatus.OURS
    return SourceStatus.THEIRS_DONE if record.is_committed else SourceStatus.THEIRS
