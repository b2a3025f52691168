"""Sees to it that temporary objects can be deleted: rule S of `shalekv.core.two_phase`.

Whoever put one may have been stalled since then, and would go on in the very moment in which it is
deleted: insert its record, and copy. So a destination without a record gets one that names a source
which never was. Whoever wants the destination takes that over, with a temporary object of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from shalekv.core.two_phase import Destination, Record, Standing, standing
from shalekv.errors import StoreUnavailable
from shalekv.format.names import parse_temporary_name
from shalekv.store.api import PlainStore
from shalekv.store.two_phase.completing import Completing, Completion
from shalekv.store.two_phase.records import Inserted, RecordStore
from shalekv.store.two_phase.sources import no_source

ATTEMPTS_MAX = 4


class Abandoning:
    """Closes the way that temporary objects have into records."""

    def __init__(self, plain: PlainStore, records: RecordStore, random: Random) -> None:
        self._url = plain.url
        self._records = records
        self._random = random
        self._completing = Completing(plain, records)

    async def abandon(self, sources: Iterable[str]) -> None:
        """Make sure that no record will name these any more. Raises `StoreUnavailable`.

        One that a record names now is what a crash has left: it is completed. REQUIRES: they have
        been seen, in a list: what is put later is not meant.
        """
        for source in sources:
            await self._abandon(source)

    async def _abandon(self, source: str) -> None:
        parsed = parse_temporary_name(source)
        if parsed is None or not parsed.destination.isascii():
            return  # we never put it
        destination = Destination(self._url, parsed.destination)
        for _ in range(ATTEMPTS_MAX):
            if await self._is_barred(destination, source):
                return
        problem = f"the record of {destination.name} changed {ATTEMPTS_MAX} times under our hands"
        raise StoreUnavailable(self._url, "delete", source, problem)

    async def _is_barred(self, destination: Destination, source: str) -> bool:
        """Whether the record keeps `source` out, after an attempt to make it so."""
        record = await self._records.find(destination)
        match standing(record, source):
            case Standing.FREE:
                barrier = Record(destination, no_source(self._random, destination))
                return await self._records.insert(barrier) == Inserted()
            case Standing.OURS_DONE | Standing.THEIRS_DONE:
                return True
        assert record is not None
        match await self._completing.complete(record):
            case Completion.DONE:
                return True
            case Completion.DEAD:
                return await self._records.take_over(record, no_source(self._random, destination))
            case Completion.CHANGED:
                return False
