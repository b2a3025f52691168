"""Following a quorum WAL: the member to read from, new records in its tail, and freshness. Pure.

A single member may be cut off from the others without knowing it: the records that it sends are
committed, but it cannot say what came after them. So freshness needs a majority. All records that
were acknowledged before the members were asked are in the log of the highest rank among a
majority's, for the same reason for which an election finds them there. A replica that has applied
the end of that log has all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shalekv.protocol.membership import Configuration
from shalekv.protocol.quorum_records import LogEnd, LogHealth, LogShape, Record


def is_new_writer(epoch: int, known_epoch: int) -> bool:
    """Return whether an object of `epoch` shows a newer writer than was known.

    Before a replica calls itself fresh, it then reads the manifest: that writer may have switched
    the WAL mode, or have a wider window.
    """
    return epoch > known_epoch


class MemberTail(NamedTuple):
    """A member's report of its log."""

    health: LogHealth
    log: LogShape  # as written
    committed_lsn: int


def sound_ids(answers: Mapping[bytes, MemberTail]) -> set[bytes]:
    """Return the members whose logs have all records that they ever acknowledged."""
    return {member_id for member_id, each in answers.items() if each.health is LogHealth.SOUND}


def newest_of_majority(
    configuration: Configuration, answers: Mapping[bytes, MemberTail]
) -> LogEnd | None:
    """Return the end of a log with all records acknowledged before these members were asked.

    None if too few have answered. The last record itself may be acknowledged or not.
    """
    sound = sound_ids(answers)
    if not configuration.is_majority(sound):
        return None
    return max((answers[member_id].log.last for member_id in sound), key=lambda mark: mark.rank)


def furthest_commit(answers: Mapping[bytes, MemberTail]) -> int:
    """Return the furthest commit point that any of these members knows."""
    return max((each.committed_lsn for each in answers.values()), default=0)


class RecordStatus(enum.Enum):
    """Relation of a record to the position of a replica."""

    KNOWN = 1  # it is applied
    NEXT = 2  # it is the next to apply
    GAP = 3  # records before it are missing
    OTHER = 4  # another record was applied in its place


@dataclass(frozen=True, slots=True)
class AppliedPosition:
    """The position up to which a replica has applied the log."""

    wal_id: int | None = None  # the last object that is applied completely, as are all before it
    # The last applied record; None if it came in an object of the archive, so its lsn is unknown.
    last: LogEnd | None = None

    @property
    def next_wal_id(self) -> int:
        """The object to apply next, of which a part may be applied already."""
        return 0 if self.wal_id is None else self.wal_id + 1

    @property
    def is_open(self) -> bool:
        """Return whether a part of the next object is applied."""
        return self.last is not None and self.last.wal_id == self.next_wal_id

    def status_of(self, record: Record) -> RecordStatus:
        """Return whether the record is the next to apply, or why not.

        REQUIRES: it comes from a tail that begins with `next_wal_id` or an object before it.
        """
        if record.wal_id < self.next_wal_id:
            return RecordStatus.KNOWN
        last = self.last
        if last is None or not self.is_open:
            # Lsns cannot be compared: the WAL may have moved to the object store and back, where
            # they begin anew.
            return RecordStatus.NEXT if record.wal_id == self.next_wal_id else RecordStatus.GAP
        if record.follows(last):
            return RecordStatus.NEXT
        if record.wal_id != last.wal_id or record.lsn > last.lsn + 1:
            return RecordStatus.GAP
        is_known = record.lsn < last.lsn or record.mark == last
        return RecordStatus.KNOWN if is_known else RecordStatus.OTHER

    def after(self, record: Record) -> AppliedPosition:
        """Return the position after applying a record. REQUIRES: it is `RecordStatus.NEXT`."""
        if record.ends_object:
            return AppliedPosition(record.wal_id, record.mark)
        # If an object before was left open, by a writer that is gone, this record ends it.
        return AppliedPosition(record.wal_id - 1 if record.wal_id else None, record.mark)

    def holds(self, newest: LogEnd) -> bool:
        """Return whether all records up to `newest` are applied, or the ones committed in their
        place.

        REQUIRES: `newest` comes from `newest_of_majority`.
        """
        if not newest.lsn:
            return False  # that log was never written to: only the object store shows the state
        if newest.wal_id is not None and newest.wal_id < self.next_wal_id:
            return True
        return self.last is not None and self.last.rank >= newest.rank


class Choice(NamedTuple):
    """The member to read the log from."""

    member_id: bytes | None  # None: no member
    is_archived: bool  # there are sound members, but the next object is only in the archive


def choose(
    answers: Mapping[bytes, MemberTail], position: AppliedPosition, avoided: Iterable[bytes] = ()
) -> Choice:
    """Choose the sound member with the furthest commit point that still has the next object.

    Members in `avoided` are left out.
    """
    usable = sound_ids(answers).difference(avoided)
    kept = {each for each in usable if _keeps(answers[each].log, position.next_wal_id)}
    if not kept:
        return Choice(None, bool(usable))
    return Choice(
        max(kept, key=lambda each: (answers[each].committed_lsn, each)), is_archived=False
    )


def _keeps(log: LogShape, wal_id: int) -> bool:
    """Return whether the member can send this object from its first record on, now or once it has
    it.

    A member cannot if it has trimmed the object. Nor can it if its log was never written to: such a
    log begins behind the archive, wherever that ends.
    """
    is_trimmed = log.base.wal_id is not None and log.base.wal_id >= wal_id
    return log.last.lsn > 0 and not is_trimmed
