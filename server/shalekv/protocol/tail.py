"""Reading a quorum's log: whom to follow, what of a tail is news, and how new it makes a replica.

Any single member may be cut off from the others without knowing it: what it sends is committed, but
it says nothing of what came after. How new a replica is follows from a majority only: whatever was
acknowledged before they were asked is in the log of the highest rank among theirs, for the reason
for which an election finds it there. A replica that has applied the end of that log lacks nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shalekv.protocol.membership import Configuration
from shalekv.protocol.quorum_records import LogEnd, LogHealth, LogShape, Record


class MemberTail(NamedTuple):
    """What a member says of its log."""

    health: LogHealth
    log: LogShape  # as written
    committed_lsn: int


def sound_ids(answers: Mapping[bytes, MemberTail]) -> set[bytes]:
    """Those whose logs lack nothing that they ever acknowledged."""
    return {member_id for member_id, each in answers.items() if each.health is LogHealth.SOUND}


def newest_of_majority(
    configuration: Configuration, answers: Mapping[bytes, MemberTail]
) -> LogEnd | None:
    """The end of a log that has all that was acknowledged before these were asked.

    None: too few have answered to tell. The record itself may be acknowledged or not.
    """
    sound = sound_ids(answers)
    if not configuration.is_majority(sound):
        return None
    return max((answers[member_id].log.last for member_id in sound), key=lambda mark: mark.rank)


def furthest_commit(answers: Mapping[bytes, MemberTail]) -> int:
    """What is committed, as far as any of these knows."""
    return max((each.committed_lsn for each in answers.values()), default=0)


class News(enum.Enum):
    """What a record of a tail is to a replica."""

    KNOWN = 1  # it is applied
    NEXT = 2
    GAP = 3  # something before it is missing
    OTHER = 4  # something else was applied in its place


@dataclass(frozen=True, slots=True)
class AppliedPosition:
    """How far a replica has applied the log."""

    wal_id: int | None = None  # the last object that is applied whole; all before it are, too
    # The last record; None: it came with an object, and its lsn is unknown.
    last: LogEnd | None = None

    @property
    def next_wal_id(self) -> int:
        """The object that is applied next, or of which a part is."""
        return 0 if self.wal_id is None else self.wal_id + 1

    @property
    def is_open(self) -> bool:
        """Whether a part of the next object is applied."""
        return self.last is not None and self.last.wal_id == self.next_wal_id

    def judge(self, record: Record) -> News:
        """What `record` is. REQUIRES: a tail has sent it that begins at `next_wal_id` or before."""
        if record.wal_id < self.next_wal_id:
            return News.KNOWN
        last = self.last
        if last is None or not self.is_open:
            # Lsns tell nothing: the log may have moved to the bucket and back, and begun anew.
            return News.NEXT if record.wal_id == self.next_wal_id else News.GAP
        if record.follows(last):
            return News.NEXT
        if record.wal_id != last.wal_id or record.lsn > last.lsn + 1:
            return News.GAP
        return News.KNOWN if record.lsn < last.lsn or record.mark == last else News.OTHER

    def after(self, record: Record) -> AppliedPosition:
        """With one more record. REQUIRES: it is `News.NEXT`."""
        if record.ends_object:
            return AppliedPosition(record.wal_id, record.mark)
        # One before that was left open, by a writer that is gone, has ended by that.
        return AppliedPosition(record.wal_id - 1 if record.wal_id else None, record.mark)

    def holds(self, newest: LogEnd) -> bool:
        """Whether all is applied up to `newest`, or whatever is committed instead of it.

        REQUIRES: it comes from `newest_of_majority`.
        """
        if not newest.lsn:
            return False  # nobody has written to that log: it is the bucket that tells
        if newest.wal_id is not None and newest.wal_id < self.next_wal_id:
            return True
        return self.last is not None and self.last.rank >= newest.rank


class Choice(NamedTuple):
    """Whom to follow."""

    member_id: bytes | None  # None: nobody
    is_archived: bool  # somebody would do, but what comes next is in the archive alone


def choose(
    answers: Mapping[bytes, MemberTail], position: AppliedPosition, avoided: Iterable[bytes] = ()
) -> Choice:
    """The freshest of the sound members that still have what comes next, `avoided` left out."""
    usable = sound_ids(answers).difference(avoided)
    kept = {each for each in usable if _keeps(answers[each].log, position.next_wal_id)}
    if not kept:
        return Choice(None, bool(usable))
    return Choice(
        max(kept, key=lambda each: (answers[each].committed_lsn, each)), is_archived=False
    )


def _keeps(log: LogShape, wal_id: int) -> bool:
    """Whether the first record of this object is there, or still to come.

    A log that nobody has written to yet begins behind the archive, wherever that ends.
    """
    is_trimmed = log.base.wal_id is not None and log.base.wal_id >= wal_id
    return log.last.lsn > 0 and not is_trimmed
