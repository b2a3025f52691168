"""Archiving as decisions: what is complete, who does it, what the log may let go of. Pure.

Objects go into the archive in order, and only what is committed does (CE7). Any member may archive
at any time, since the bytes are a function of the log and a name is created once: who does it is a
matter of thrift, never of safety.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from shalekv.protocol.membership import Configuration
from shalekv.protocol.quorum_records import Mark, Record


class LogObject(NamedTuple):
    """An object that is complete and committed: its records stand from `first_lsn` to `last`."""

    wal_id: int
    first_lsn: int
    last: Mark


def complete_objects(records: Iterable[Record], committed_lsn: int) -> Sequence[LogObject]:
    """The objects that no record can be added to any more, not even by another leader.

    An object ends with a record that says so, or before the first of a later one: a leader that is
    new begins one. Either is a word of the log only when it is committed (CE7). REQUIRES: `records`
    follow each other, and the first is the first of its object.
    """
    committed = (record for record in records if record.lsn <= committed_lsn)
    found: list[LogObject] = []
    is_complete = True
    for wal_id, group in groupby(committed, key=attrgetter("wal_id")):
        first, *more = group
        last = (more or [first])[-1].mark
        found.append(LogObject(wal_id, first.lsn, last))
        is_complete = last.ends_object
    return found if is_complete else found[:-1]


def archive_tip(listed: Collection[int], known: int | None) -> int | None:
    """The object up to which the archive has all, or had: what is compacted may be collected.

    `known` is c, or what was seen before if that is more. REQUIRES: `listed` tells of all objects
    above it, and c was read after that list: so what was collected before it is no hole.
    """
    tip = known
    while (following := 0 if tip is None else tip + 1) in listed:
        tip = following
    return tip


def trim_mark(
    objects: Iterable[LogObject], *, seen_wal_id: int | None, committed_lsn: int
) -> Mark | None:
    """The record up to which the log may be dropped; None: nothing may.

    `seen_wal_id` is how far this very member has listed the archive, without a hole. Nothing that
    was heard from others counts, nor that an upload ended well.
    """
    mark = None
    for each in objects:
        if not is_archived(each.wal_id, seen_wal_id) or each.last.lsn > committed_lsn:
            break
        mark = each.last
    return mark


def is_archived(wal_id: int, tip: int | None) -> bool:
    """Whether an object is in the archive that goes up to `tip`."""
    return tip is not None and wal_id <= tip


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a member has seen the same object wait for whoever is to archive it."""

    wal_id: int | None = None  # None: nothing waits
    since_ms: float = 0  # by its own clock of lapsed time

    def looked(self, first_waiting: int | None, now_ms: float) -> Patience:
        """After a look at the archive, in which this object is the first that is missing."""
        return self if first_waiting == self.wal_id else Patience(first_waiting, now_ms)

    def has_ended(self, now_ms: float, *, takeover_ms: float, place: int) -> bool:
        """Whether it archives now what waits. Those with a lower `place` have tried before it."""
        return self.wal_id is not None and now_ms - self.since_ms >= takeover_ms * (1 + place)


def takeover_place(member_id: bytes, configuration: Configuration, appointed_id: bytes) -> int:
    """How many others try before this member does when the appointed one does not archive."""
    ids = [member.id for member in configuration.everyone]
    start = ids.index(appointed_id) + 1 if appointed_id in ids else 0
    order = [*ids[start:], *ids[:start]]
    return order.index(member_id) if member_id in order else len(order)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a writer knows of a member that could archive."""

    member_id: bytes
    is_fit: bool  # connected, and its log is sound
    flushed_lsn: int
    archived_wal_id: int | None


@dataclass(frozen=True, slots=True)
class Appointment:
    """Whom the writer has asked to archive, and since when nothing has come of it."""

    member_id: bytes = b""  # empty: nobody
    progress: int | None = None  # the object up to which that member archived, when last asked
    since_ms: float = 0  # when it was seen to move, or nothing waited, or it was appointed
    tried: frozenset[bytes] = frozenset()  # were appointed since, and nothing came of it

    def judged(
        self,
        candidates: Collection[Candidate],
        now_ms: float,
        *,
        complete_wal_id: int | None,
        takeover_ms: float,
    ) -> Appointment:
        """Whom to ask from now on. `complete_wal_id` is the last object that can be archived.

        Another one is asked when this one is gone, or when its archive has stood still for
        `takeover_ms` while something waits.
        """
        present = next((c for c in candidates if c.member_id == self.member_id and c.is_fit), None)
        if present is None:
            return self._with(_best(candidates, frozenset()), now_ms, frozenset())
        is_waiting = complete_wal_id is not None and not is_archived(
            complete_wal_id, present.archived_wal_id
        )
        if not is_waiting or present.archived_wal_id != self.progress:
            progress = present.archived_wal_id
            return replace(self, progress=progress, since_ms=now_ms, tried=frozenset())
        if now_ms - self.since_ms < takeover_ms:
            return self
        tried = self.tried | {self.member_id}
        another = _best(candidates, tried)
        if another is None:  # all were: once more from the beginning
            tried = frozenset({self.member_id})
            another = _best(candidates, tried) or present
        return self._with(another, now_ms, tried)

    def _with(
        self, chosen: Candidate | None, now_ms: float, tried: frozenset[bytes]
    ) -> Appointment:
        if chosen is None:
            return Appointment(since_ms=now_ms)
        return Appointment(chosen.member_id, chosen.archived_wal_id, now_ms, tried)


def _best(candidates: Iterable[Candidate], tried: Collection[bytes]) -> Candidate | None:
    """The fit one with the longest log; of several the one that the id decides."""
    fit = [each for each in candidates if each.is_fit and each.member_id not in tried]
    return max(fit, key=lambda each: (each.flushed_lsn, each.member_id), default=None)
