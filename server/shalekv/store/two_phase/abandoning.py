"""Deletes temporary objects: rule S of `shalekv.protocol.two_phase`.

Whoever put one may have been stalled since then, and would go on in the very moment in which it is
deleted: enter it into the record, and copy. So it is kept out while it is deleted, by a record that
is committed or one that names a source which never was. When it is gone, nobody can copy it any
more, and that record is withdrawn. Who wants the destination meanwhile takes it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from shalekv.errors import StoreUnavailable
from shalekv.format.names import parse_temporary_name
from shalekv.protocol.two_phase import Destination, Record, Standing, standing
from shalekv.store.api import PlainStore
from shalekv.store.two_phase.completing import Completing, Completion
from shalekv.store.two_phase.records import Inserted, RecordStore
from shalekv.store.two_phase.sources import no_source

ATTEMPTS_MAX = 4


class Abandoning:
    """Deletes temporary objects of one database."""

    def __init__(self, plain: PlainStore, records: RecordStore, random: Random) -> None:
        self._plain = plain
        self._records = records
        self._random = random
        self._completing = Completing(plain, records)

    async def delete(self, sources: Sequence[str]) -> None:
        """Delete them. Raises `StoreUnavailable`; then some may be deleted.

        One that a record names is what a crash has left: it is completed. REQUIRES: they have been
        seen, in a list: what is put later is not meant.
        """
        barriers = [await self._bar(source) for source in sources]
        await self._plain.delete(sources)
        for barrier in barriers:
            if barrier is not None:
                await self._records.withdraw(barrier)

    async def _bar(self, source: str) -> Record | None:
        """Keep `source` out of the record for good, or by a record that is returned."""
        parsed = parse_temporary_name(source)
        if parsed is None or not parsed.destination.isascii():
            return None  # we never put it
        destination = Destination(self._plain.url, parsed.destination)
        for _ in range(ATTEMPTS_MAX):
            record = await self._records.find(destination)
            match standing(record, source):
                case Standing.OURS_DONE | Standing.THEIRS_DONE:
                    return None
            completion = Completion.DEAD
            if record is not None:
                completion = await self._completing.complete(record)
            if completion is Completion.DONE:
                return None
            barrier = Record(destination, no_source(self._random, destination))
            if completion is Completion.DEAD and await self._enter(barrier, record):
                return barrier
        problem = f"the record of {destination.name} changed {ATTEMPTS_MAX} times under our hands"
        raise StoreUnavailable(self._plain.url, "delete", source, problem)

    async def _enter(self, barrier: Record, dead: Record | None) -> bool:
        if dead is None:
            return await self._records.insert(barrier) == Inserted()
        return await self._records.take_over(dead, barrier.source)
