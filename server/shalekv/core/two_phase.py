"""Two-phase compare-and-swap as decisions (seed 000, "Two-Phase CAS Protocol"; protocol, 2).

A store without conditional writes decides who creates an object with the help of a record in a
transactional store. What the record of a destination says to an attempt with the temporary object
`source`, and to whoever wants to delete that:

    record        Standing       the attempt                     the deletion of `source`
    ------------- -------------- ------------------------------- -----------------------------
    none          FREE           inserts one                     inserts one of its own first
    ours, open    OURS           copies, commits, deletes        completes it: that deletes it
    ours, done    OURS_DONE      is done: the object is there    is free to
    theirs, open  THEIRS         helps, and then has lost        completes theirs first
    theirs, done  THEIRS_DONE    has lost                        is free to

An open record whose source and destination are both gone is dead: nobody can complete it, and
whoever wants the destination takes it over. Of that, and of the row FREE, rule S takes care:

    S   A record never gets to name a source that somebody may have deleted. An attempt has one
        chance to enter its source: an insert if no record is there, or a take-over of a record
        that it had read before it put its source. Whoever deletes a source sees to it first that
        this chance has failed or will: the record is done, or names a source that was drawn
        after the deleted one was seen.

So nobody copies a source that may be deleted at the same time, and no copy that was begun for one
record can land on what another one has put there, however long who sent it was stalled (I10).
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
class Record:
    """Who creates `destination`: the attempt whose temporary object is `source`.

    `is_committed`: the destination has been made, and the source is not needed any more.
    """

    destination: Destination
    source: str  # a name of the same database, which no other attempt ever uses
    is_committed: bool = False


class Standing(enum.Enum):
    """What the record of a destination says to the owner of a source. See the table above."""

    FREE = "no record"
    OURS = "ours, to be completed"
    OURS_DONE = "ours, committed"
    THEIRS = "another's, to be completed"
    THEIRS_DONE = "another's, committed"


def standing(record: Record | None, source: str) -> Standing:
    """What `record` says to the owner of `source`."""
    if record is None:
        return Standing.FREE
    if record.source == source:
        return Standing.OURS_DONE if record.is_committed else Standing.OURS
    return Standing.THEIRS_DONE if record.is_committed else Standing.THEIRS
