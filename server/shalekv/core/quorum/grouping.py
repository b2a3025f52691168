"""Which object of the archive the next record goes into, and where that object ends.

A record is one group commit and small; an object of the archive is one request that is paid for.
So the records of some time, or of so many bytes, share one. The boundaries are decided once, by the
writer, and stand in the log (CE16).

    take        the next record: it goes on with the open object, or begins one, and may end it
    seal        an empty record that ends the open object, when nothing came that would
    take alone  a fence, a load: begins an object and ends it

How many objects this makes of a log that is never idle: one for each interval, and those that are
full sooner. With `CHARGED_INTERVAL_MS` that is 4 a second, 345 600 a day; with `FREE_INTERVAL_MS`
20 a second, 1 728 000 a day. A log in which one write stands alone makes one object of it, as the
WAL in the object store does. Nobody waits for these objects: a write is durable, and seen by
replicas, when a majority of safekeepers has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

# Between the beginnings of two objects, on stores that charge for a request and on those that don't
# (file://, memory://).
CHARGED_INTERVAL_MS = 250
FREE_INTERVAL_MS = 50


@dataclass(frozen=True, slots=True)
class GroupingPolicy:
    """When an object ends."""

    interval_ms: float  # since it was begun; 0: each record is an object
    object_bytes: int  # no record goes into an object that would pass this by it, nor one behind it


class Place(NamedTuple):
    """What a record has to say of its object."""

    wal_id: int
    ends_object: bool


@dataclass(frozen=True, slots=True)
class OpenObject:
    """One whose last record is still to come."""

    wal_id: int
    begun_ms: float  # by a clock of lapsed time
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """The end of the log, as far as boundaries are concerned."""

    policy: GroupingPolicy
    next_wal_id: int  # of the object that would be begun now
    begun: OpenObject | None = None  # whose end is still to come

    def take(self, size_bytes: int, now_ms: float) -> tuple[Place, Grouping]:
        """The place of a record of so many bytes, and what comes of it."""
        begun = self.begun
        if begun is not None and begun.size_bytes + size_bytes > self.policy.object_bytes:
            begun = None  # the one that is open is complete when the first of the next is committed
        if begun is None:
            begun = OpenObject(self.next_wal_id, now_ms, 0)
        grown = replace(begun, size_bytes=begun.size_bytes + size_bytes)
        is_full = grown.size_bytes >= self.policy.object_bytes
        ends_object = is_full or now_ms >= self._due_ms(grown)
        place = Place(grown.wal_id, ends_object)
        after = replace(self, next_wal_id=grown.wal_id + 1, begun=None if ends_object else grown)
        return place, after

    def take_alone(self) -> tuple[Place, Grouping]:
        """The place of a fence or of a load: nothing else is in its object."""
        place = Place(self.next_wal_id, ends_object=True)
        return place, replace(self, next_wal_id=place.wal_id + 1, begun=None)

    def seal(self) -> tuple[Place, Grouping] | None:
        """The place of an empty record that ends the open object; None: none is open."""
        if self.begun is None:
            return None
        return Place(self.begun.wal_id, ends_object=True), replace(self, begun=None)

    @property
    def seal_due_ms(self) -> float | None:
        """When the open object is to be sealed if no record ends it before; None: none is open."""
        return None if self.begun is None else self._due_ms(self.begun)

    def _due_ms(self, begun: OpenObject) -> float:
        return begun.begun_ms + self.policy.interval_ms
