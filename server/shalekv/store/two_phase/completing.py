"""Completes the create of whoever entered its source into a record: helping, and recovery."""

from __future__ import annotations

import enum
from dataclasses import replace

import structlog

from shalekv.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import Destination, Record
from shalekv.store.api import PlainStore
from shalekv.store.two_phase.records import RecordStore

log = structlog.get_logger()


class Completion(enum.Enum):
    """What the completion of an open record came to."""

    DONE = "the destination is there, and the record says so"
    DEAD = "source and destination are both gone"
    CHANGED = "the record was taken over, or forgotten, meanwhile: look again"


class Completing:
    """Steps 3 to 5 of a create, for anybody's record and any number of times."""

    def __init__(self, plain: PlainStore, records: RecordStore) -> None:
        self._plain = plain
        self._records = records

    async def complete(self, record: Record) -> Completion:
        """Complete an open record. Raises `StoreUnavailable` and `StoreRefused`.

        To copy once more is harmless: as long as the record stands, its source is the one thing
        that is ever copied there, and it never changes.
        """
        try:
            await self._plain.copy(record.source, record.destination.name)
        except ObjectNotFound:
            # Looked for in this order: a source goes after its record is committed, and that is
            # after the destination is there. So what somebody else completes never looks dead.
            if not await self.is_there(record.destination):
                return Completion.DEAD
        except StoreUnavailable:
            # Some servers fail when the source goes while they copy it: then this is done.
            if await self._records.find(record.destination) != replace(record, is_committed=True):
                raise
            return Completion.DONE
        if not await self._records.commit(record):
            return Completion.CHANGED
        await self.discard(record.source)
        return Completion.DONE

    async def is_there(self, destination: Destination) -> bool:
        """Whether the destination has its object."""
        try:
            await self._plain.head(destination.name)
        except ObjectNotFound:
            return False
        return True

    async def discard(self, source: str) -> None:
        """Delete a source that no record will name any more (rule S).

        If that fails, the collector finds the source when it is old.
        """
        try:
            await self._plain.delete([source])
        except (StoreUnavailable, StoreRefused) as error:
            log.info("temporary object left to the collector", error=str(error))
