"""Records in the memory of one process, for tests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from shalekv.protocol.two_phase import Destination, Record
from shalekv.store.requests import RequestCounts, RequestKind
from shalekv.store.two_phase.records import (
    PAGE_RECORDS,
    Inserted,
    InsertOutcome,
    Occupied,
    RecordStore,
)

Table = dict[Destination, Record]


class MemoryRecords(RecordStore):
    """Records that end with the process. Stores that are given the same table share it."""

    def __init__(self, *, table: Table | None = None) -> None:
        self.url = "memory://records"
        self.sent = RequestCounts()
        self._table = {} if table is None else table

    async def ensure_schema(self) -> None:
        """There is none."""

    async def insert(self, record: Record) -> InsertOutcome:
        self.sent.add(RequestKind.RECORD_WRITE)
        found = self._table.get(record.destination)
        if found is not None:
            return Occupied(found)
        self._table[record.destination] = record
        return Inserted()

    async def find(self, destination: Destination) -> Record | None:
        self.sent.add(RequestKind.RECORD_READ)
        return self._table.get(destination)

    async def commit(self, record: Record) -> bool:
        self.sent.add(RequestKind.RECORD_WRITE)
        found = self._table.get(record.destination)
        if found is None or found.source != record.source:
            return False
        self._table[record.destination] = replace(found, is_committed=True)
        return True

    async def take_over(self, record: Record, source: str) -> bool:
        self.sent.add(RequestKind.RECORD_WRITE)
        found = self._table.get(record.destination)
        if found is None or found.source != record.source or found.is_committed:
            return False
        self._table[record.destination] = replace(found, source=source)
        return True

    async def withdraw(self, record: Record) -> None:
        self.sent.add(RequestKind.RECORD_WRITE)
        found = self._table.get(record.destination)
        if found is not None and found.source == record.source and not found.is_committed:
            del self._table[record.destination]

    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        for destination in destinations:
            self.sent.add(RequestKind.RECORD_WRITE)
            found = self._table.get(destination)
            if found is not None and found.is_committed:
                del self._table[destination]

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[Record]:
        after = ""
        is_last = False
        while not is_last:
            self.sent.add(RequestKind.RECORD_READ)
            names = sorted(each.name for each in self._table if each.database == database)
            first = bisect_right(names, after)
            page = [
                self._table[Destination(database, name)]
                for name in names[first : first + PAGE_RECORDS]
            ]
            is_last = len(page) < PAGE_RECORDS
            for record in page:
                after = record.destination.name
                if not (uncommitted_only and record.is_committed):
                    yield record

    async def close(self) -> None:
        """Nothing is held."""
