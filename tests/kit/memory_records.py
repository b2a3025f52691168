"""Records of two-phase creates in the memory of the tests' process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.store.two_phase.records import (
    PAGE_RECORDS,
    Inserted,
    InsertOutcome,
    Occupied,
    RecordStore,
)

Table = dict[Destination, CreateRecord]


class MemoryRecords(RecordStore):
    """Records in memory. Stores with the same `table` share it."""

    def __init__(self, *, table: Table | None = None) -> None:
        self.url = "memory://records"
        self.sent = RequestCounts()
        self._table = {} if table is None else table

    async def ensure_schema(self) -> None:
        """Do nothing: there is no table to create."""

    async def insert(self, record: CreateRecord) -> InsertOutcome:
        self.sent.add(RequestKind.RECORD_WRITE)
        found = self._table.get(record.destination)
        if found is not None:
            return Occupied(found)
        self._table[record.destination] = record
        return Inserted()

    async def find(self, destination: Destination) -> CreateRecord | None:
        self.sent.add(RequestKind.RECORD_READ)
        return self._table.get(destination)

    async def commit(self, record: CreateRecord) -> bool:
        self.sent.add(RequestKind.RECORD_WRITE)
        found = self._table.get(record.destination)
        if found is None or found.source != record.source:
            return False
        self._table[record.destination] = replace(found, is_committed=True)
        return True

    async def take_over(self, record: CreateRecord, source: str) -> bool:
        self.sent.add(RequestKind.RECORD_WRITE)
        found = self._table.get(record.destination)
        if found is None or found.source != record.source or found.is_committed:
            return False
        self._table[record.destination] = replace(found, source=source)
        return True

    async def withdraw(self, record: CreateRecord) -> None:
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

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[CreateRecord]:
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
        """Do nothing."""
