"""What two-phase compare-and-swap asks of a transactional store: a record for each destination.

Every change is one conditional statement, durable when it is answered, and every read sees all
changes that were answered before it was sent. Destinations and sources are compared by their bytes.
"""

from __future__ import annotations

import abc
import enum
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import RequestCounts, RequestKind

# --- answers
# What the error of a transactional store says about the request that it answers.


class StatementOutcome(enum.Enum):
    """What became of a statement."""

    UNKNOWN = "nobody knows"
    NOT_DONE = "not carried out; the next time it may be"
    REFUSED = "not carried out, and it will not be"
    CONFLICT = "not carried out: the key is there"


# --- records


PAGE_RECORDS = 1_000


@dataclass(frozen=True, slots=True)
class Inserted:
    """This call inserted the record."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """This record was there, and this call inserted nothing."""

    record: CreateRecord


@dataclass(frozen=True, slots=True)
class InsertUnknown:
    """No answer. The record may be there, may appear later, or may never: compare sources."""

    cause: str


InsertOutcome = Inserted | Occupied | InsertUnknown


class RecordStore(abc.ABC):
    """The records of any number of databases.

    Every method may raise `StoreRefused`: nothing was done, and somebody has to mend something
    first. `StoreUnavailable` says of `insert` that nothing was inserted, and of the other changes
    that they may have been made, or may be made later: read to find out.
    """

    url: str  # without credentials: it stands in logs and errors
    sent: RequestCounts  # whoever opens the store may have it count elsewhere

    @abc.abstractmethod
    async def ensure_schema(self) -> None:
        """Create the table if there is none. The other methods call it before their first use."""

    @abc.abstractmethod
    async def insert(self, record: CreateRecord) -> InsertOutcome:
        """Add `record` unless its destination has one."""

    @abc.abstractmethod
    async def find(self, destination: Destination) -> CreateRecord | None:
        """The record of `destination`."""

    @abc.abstractmethod
    async def commit(self, record: CreateRecord) -> bool:
        """Mark as committed the record of this destination if it names this source, and if so."""

    @abc.abstractmethod
    async def take_over(self, record: CreateRecord, source: str) -> bool:
        """Have the record of this destination name `source` instead of the source it names here.

        False: it names another one, is committed, or is gone.
        """

    @abc.abstractmethod
    async def withdraw(self, record: CreateRecord) -> None:
        """Delete the record of this destination if it names this source and is not committed."""

    @abc.abstractmethod
    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        """Delete the records of `destinations`, but for those that are not committed."""

    @abc.abstractmethod
    def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[CreateRecord]:
        """The records of a database by the bytes of their names, read page by page.

        Records that come and go meanwhile are in it, or not.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections. The store must not be used afterwards."""


# --- memory
# Records in the memory of one process, for tests.


Table = dict[Destination, CreateRecord]


class MemoryRecords(RecordStore):
    """Records that end with the process. Stores that are given the same table share it."""

    def __init__(self, *, table: Table | None = None) -> None:
        self.url = "memory://records"
        self.sent = RequestCounts()
        self._table = {} if table is None else table

    async def ensure_schema(self) -> None:
        """There is none."""

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
        """Nothing is held."""
