"""The interface of transactional stores for two-phase compare-and-swap.

A destination has at most one record. Every change is one conditional statement, durable when it is
answered, and every read sees all changes that were answered before it was sent. Destinations and
sources are compared by their bytes.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import RequestCounts

PAGE_RECORDS = 1_000


class StatementOutcome(enum.Enum):
    """Outcome of a statement that failed, by the error of the transactional store."""

    UNKNOWN = "unknown whether it was carried out"
    NOT_DONE = "not carried out; a retry may succeed"
    REFUSED = "not carried out; a retry fails again"
    CONFLICT = "not carried out: the key exists"


@dataclass(frozen=True, slots=True)
class Inserted:
    """This call inserted the record."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """The destination has this record. It may be our own, if the insert was sent twice."""

    record: CreateRecord


@dataclass(frozen=True, slots=True)
class InsertUnknown:
    """No answer. The record may exist, may appear later, or may never: compare sources."""

    cause: str


InsertOutcome = Inserted | Occupied | InsertUnknown


class RecordStore(abc.ABC):
    """The records of any number of databases.

    Every method may raise `StoreRefused`: nothing was done, and an operator must fix the cause
    first. When `insert` raises `StoreUnavailable`, nothing was inserted. When another change
    raises it, the change may have been made, or may be made later: read to find out.
    """

    url: str  # without credentials: it appears in logs and errors
    sent: RequestCounts  # the two-phase store replaces it by that of its objects

    @abc.abstractmethod
    async def ensure_schema(self) -> None:
        """Create the table if there is none. The other methods call it before their first use."""

    @abc.abstractmethod
    async def insert(self, record: CreateRecord) -> InsertOutcome:
        """Add `record` unless its destination has one."""

    @abc.abstractmethod
    async def find(self, destination: Destination) -> CreateRecord | None:
        """Return the record of `destination`, or None."""

    @abc.abstractmethod
    async def commit(self, record: CreateRecord) -> bool:
        """Mark the record of this destination as committed if it names this source.

        Return whether it does.
        """

    @abc.abstractmethod
    async def take_over(self, record: CreateRecord, source: str) -> bool:
        """Replace the source of `record` by `source`.

        Return False, and change nothing, if the stored record names another source, is committed,
        or is gone.
        """

    @abc.abstractmethod
    async def withdraw(self, record: CreateRecord) -> None:
        """Delete the record of this destination if it names this source and is not committed."""

    @abc.abstractmethod
    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        """Delete the records of `destinations` that are committed."""

    @abc.abstractmethod
    def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[CreateRecord]:
        """List the records of a database in the order of the bytes of their names, page by page.

        Records that are inserted or deleted meanwhile may be missing or included.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections. The store must not be used afterwards."""
