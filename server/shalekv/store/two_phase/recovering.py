"""Recovery: completes what crashed creates have left, and forgets what was collected.

It may run at any time, in any number of processes, while creates go on: whatever it does to a
record, the record's owner could be doing in the same moment.
"""

from __future__ import annotations

from collections import defaultdict

from shalekv.protocol.two_phase import Destination, Record
from shalekv.store.api import IsCollected, PlainStore, Recovered, nothing_is_collected
from shalekv.store.two_phase.completing import Completing, Completion
from shalekv.store.two_phase.records import RecordStore

BATCH_RECORDS = 1_000


class Recovering:
    """One recovery of one database."""

    def __init__(self, plain: PlainStore, records: RecordStore, is_collected: IsCollected) -> None:
        self._plain = plain
        self._records = records
        self._is_collected = is_collected
        self._completing = Completing(plain, records)

    async def recover(self) -> Recovered:
        """As `ObjectStore.recover` says. Who knows nothing of collected names sees open records."""
        completed = unfinished = 0
        async for record in self._records.list(self._plain.url, uncommitted_only=True):
            match await self._completing.complete(record):
                case Completion.DONE:
                    completed += 1
                case Completion.DEAD if self._is_collected(record.destination.name):
                    # Nobody can complete it, and nobody will miss it: so it can be forgotten.
                    await self._records.commit(record)
                case Completion.DEAD:
                    unfinished += 1
        forgotten = 0 if self._is_collected is nothing_is_collected else await self._forget()
        aborted = (await self._plain.recover(self._is_collected)).aborted
        return Recovered(completed, unfinished, forgotten, aborted)

    async def _forget(self) -> int:
        """Delete the records of objects that were collected and are gone."""
        forgotten = 0
        batch: list[Record] = []
        async for record in self._records.list(self._plain.url, uncommitted_only=False):
            if record.is_committed and self._is_collected(record.destination.name):
                batch.append(record)
            if len(batch) == BATCH_RECORDS:
                forgotten += await self._forget_gone(batch)
                batch = []
        return forgotten + (await self._forget_gone(batch) if batch else 0)

    async def _forget_gone(self, batch: list[Record]) -> int:
        """REQUIRES: all were seen committed before: an object that is made now is not missed."""
        by_folder: dict[str, list[Record]] = defaultdict(list)
        for record in batch:
            by_folder[record.destination.name.rpartition("/")[0]].append(record)
        gone = []
        for folder, records in by_folder.items():
            there = await self._there(folder, [record.destination.name for record in records])
            gone += [r.destination for r in records if r.destination.name not in there]
        if gone:
            await self._records.delete_committed(gone)
        return len(gone)

    async def _there(self, folder: str, names: list[str]) -> set[str]:
        """Which of these objects are there: one page of a list tells of a thousand."""
        if not folder:  # a list is of a folder
            return {name for name in names if await self._is_there(name)}
        first, last = min(names), max(names)
        there = set()
        # All that begins with a name comes after what the name itself begins with.
        async for info in self._plain.list(f"{folder}/", start_after=first[:-1]):
            if info.name > last:
                break
            there.add(info.name)
        return there.intersection(names)

    async def _is_there(self, name: str) -> bool:
        return await self._completing.is_there(Destination(self._plain.url, name))
