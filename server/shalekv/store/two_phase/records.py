"""What two-phase compare-and-swap asks of a transactional store: a record for each destination.

Every change is one conditional statement, durable when it is answered, and every read sees all
changes that were answered before it was sent. Destinations and sources are compared by their bytes.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from shalekv.protocol.two_phase import Destination, Record
from shalekv.store.requests import RequestCounts

PAGE_RECORDS = 1_000


@dataclass(frozen=True, slots=True)
class Inserted:
    """This call inserted the record."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """This record was there, and this call inserted nothing."""

    record: Record


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
    async def insert(self, record: Record) -> InsertOutcome:
        """Add `record` unless its destination has one."""

    @abc.abstractmethod
    async def find(self, destination: Destination) -> Record | None:
        """The record of `destination`."""

    @abc.abstractmethod
    async def commit(self, record: Record) -> bool:
        """Mark as committed the record of this destination if it names this source, and if so."""

    @abc.abstractmethod
    async def take_over(self, record: Record, source: str) -> bool:
        """Have the record of this destination name `source` instead of the source it names here.

        False: it names another one, is committed, or is gone.
        """

    @abc.abstractmethod
    async def withdraw(self, record: Record) -> None:
        """Delete the record of this destination if it names this source and is not committed."""

    @abc.abstractmethod
    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        """Delete the records of `destinations`, but for those that are not committed."""

    @abc.abstractmethod
    def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[Record]:
        """The records of a database by the bytes of their names, read page by page.

        Records that come and go meanwhile are in it, or not.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections. The store must not be used afterwards."""
