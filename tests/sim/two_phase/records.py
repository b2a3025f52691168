"""A simulated transactional store: one table of records, changed by one statement at a time."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shalekv.errors import StoreUnavailable
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.store.two_phase.records import InsertOutcome, InsertUnknown, RecordStore
from tests.kit.memory_records import MemoryRecords
from tests.sim.network import Network, NoAnswer, Refused
from tests.sim.nodes import Node
from tests.sim.store import run_now

if TYPE_CHECKING:
    from tests.kit.memory_records import Table
    from tests.sim.loop import SimLoop


class Change(enum.Enum):
    """Kind of change of an object."""

    PUT = "put"
    COPIED = "copied"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class ObjectChanged:
    """An object was put, overwritten by a copy, or deleted; `data` is what it holds then."""

    node: str  # label of the node that requested it
    change: Change
    name: str
    data: bytes = b""


class RecordChange(enum.Enum):
    """Kind of change of a record."""

    INSERTED = "inserted"
    COMMITTED = "committed"
    TAKEN_OVER = "taken over"
    WITHDRAWN = "withdrawn"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """A change of a record took effect."""

    node: str
    change: RecordChange
    before: CreateRecord | None
    after: CreateRecord | None

    @property
    def name(self) -> str:
        either = self.before or self.after
        return either.destination.name if either is not None else ""


@dataclass(slots=True, eq=False)
class Call:
    """One `create` in progress: the temporary objects that it has put up to now."""

    sources: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CreateEnded:
    """A `create` ended. `outcome` is the name of the type that it returned or raised."""

    node: str
    name: str
    data: bytes
    outcome: str
    sources: tuple[str, ...]


Happening: TypeAlias = ObjectChanged | RecordChanged | CreateEnded

# The create for which the current task makes its requests.
CALL: ContextVar[Call] = ContextVar("tests.sim.two_phase.call")


T = TypeVar("T")


class RecordTable:
    """The table, where statements are applied. They are those of `MemoryRecords`."""

    def __init__(self, loop: SimLoop, node: Node, happened: list[Happening]) -> None:
        """No records; `node` is the transactional store, for the timeline."""
        self.rows: Table = {}
        self._loop = loop
        self._node = node
        self._happened = happened
        self._records = MemoryRecords(table=self.rows)

    def insert(self, sender: Node, record: CreateRecord) -> InsertOutcome:
        apply = partial(self._records.insert, record)
        return self._apply(sender, RecordChange.INSERTED, record.destination, apply)

    def commit(self, sender: Node, record: CreateRecord) -> bool:
        apply = partial(self._records.commit, record)
        return self._apply(sender, RecordChange.COMMITTED, record.destination, apply)

    def take_over(self, sender: Node, record: CreateRecord, source: str) -> bool:
        apply = partial(self._records.take_over, record, source)
        return self._apply(sender, RecordChange.TAKEN_OVER, record.destination, apply)

    def withdraw(self, sender: Node, record: CreateRecord) -> None:
        apply = partial(self._records.withdraw, record)
        self._apply(sender, RecordChange.WITHDRAWN, record.destination, apply)

    def delete_committed(self, sender: Node, destinations: Iterable[Destination]) -> None:
        for each in destinations:
            apply = partial(self._records.delete_committed, [each])
            self._apply(sender, RecordChange.DELETED, each, apply)

    def find(self, destination: Destination) -> CreateRecord | None:
        return self.rows.get(destination)

    def page(self, database: str, after: str, limit: int) -> list[CreateRecord]:
        """The first `limit` records of a database whose names come after `after`."""
        ours = (each for each in self.rows if each.database == database and each.name > after)
        return [self.rows[each] for each in sorted(ours, key=lambda each: each.name)[:limit]]

    def _apply(
        self,
        sender: Node,
        change: RecordChange,
        destination: Destination,
        apply: Callable[[], Coroutine[None, None, T]],
    ) -> T:
        before = self.rows.get(destination)
        answer = run_now(apply())
        after = self.rows.get(destination)
        if before != after:
            self._loop.note(f"record of {destination.name} {change.value}", self._node)
            self._happened.append(RecordChanged(sender.label, change, before, after))
        return answer


class SimRecords(RecordStore):
    """One client of the transactional store, on one node."""

    def __init__(self, table: RecordTable, network: Network, node: Node, page_records: int) -> None:
        self.url = "sim://records"
        self.sent = RequestCounts()
        self._table = table
        self._network = network
        self._node = node
        self._page_records = page_records

    async def ensure_schema(self) -> None:
        """There is none."""

    async def insert(self, record: CreateRecord) -> InsertOutcome:
        serve = partial(self._table.insert, self._node, record)
        try:
            return await self._send(RequestKind.RECORD_WRITE, "insert", [record.destination], serve)
        except Refused as refusal:
            raise self._unavailable("insert", record.destination.name, refusal) from None
        except NoAnswer as silence:
            return InsertUnknown(silence.cause)

    async def find(self, destination: Destination) -> CreateRecord | None:
        serve = partial(self._table.find, destination)
        return await self._ask(RequestKind.RECORD_READ, "find", [destination], serve)

    async def commit(self, record: CreateRecord) -> bool:
        serve = partial(self._table.commit, self._node, record)
        return await self._ask(RequestKind.RECORD_WRITE, "commit", [record.destination], serve)

    async def take_over(self, record: CreateRecord, source: str) -> bool:
        serve = partial(self._table.take_over, self._node, record, source)
        return await self._ask(RequestKind.RECORD_WRITE, "take_over", [record.destination], serve)

    async def withdraw(self, record: CreateRecord) -> None:
        serve = partial(self._table.withdraw, self._node, record)
        await self._ask(RequestKind.RECORD_WRITE, "withdraw", [record.destination], serve)

    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        """In several statements, as servers have it: any of them may fail."""
        remaining = iter(destinations)
        while some := [*islice(remaining, self._page_records)]:
            serve = partial(self._table.delete_committed, self._node, some)
            await self._ask(RequestKind.RECORD_WRITE, "delete_committed", some, serve)

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[CreateRecord]:
        folder = Destination(database, "")
        after, is_last = "", False
        while not is_last:
            serve = partial(self._table.page, database, after, self._page_records)
            page = await self._ask(RequestKind.RECORD_READ, "list", [folder], serve)
            is_last = len(page) < self._page_records
            for record in page:
                after = record.destination.name
                if not (uncommitted_only and record.is_committed):
                    yield record

    async def close(self) -> None:
        """Nothing is held."""

    async def _ask(
        self,
        kind: RequestKind,
        operation: str,
        destinations: Sequence[Destination],
        serve: Callable[[], T],
    ) -> T:
        try:
            return await self._send(kind, operation, destinations, serve)
        except NoAnswer as silence:
            raise self._unavailable(operation, str(destinations[0]), silence) from None

    async def _send(
        self,
        kind: RequestKind,
        operation: str,
        destinations: Sequence[Destination],
        serve: Callable[[], T],
    ) -> T:
        self.sent.add(kind)
        names = tuple(each.name for each in destinations)
        return await self._network.ask(self._node, operation, names, serve)

    def _unavailable(self, operation: str, name: str, silence: NoAnswer) -> StoreUnavailable:
        return StoreUnavailable(self.url, operation, name, silence.cause)
