"""Records in a table of an SQL database: SQLite, MySQL, MariaDB or PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, CursorResult, Executable, and_, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from shalekv.errors import StoreError, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import Destination, Record
from shalekv.store.requests import RequestCounts, RequestKind
from shalekv.store.two_phase.answers import Answer
from shalekv.store.two_phase.records import (
    PAGE_RECORDS,
    Inserted,
    InsertOutcome,
    InsertUnknown,
    Occupied,
    RecordStore,
)
from shalekv.store.two_phase.sql_engines import Limits, SqlPlace, open_engine
from shalekv.store.two_phase.sql_errors import answer_in
from shalekv.store.two_phase.sql_schema import prepare
from shalekv.store.two_phase.sql_table import RECORDS

DELETED_AT_ONCE = 200
INSERTS_MAX = 4
CHECK_URL = "Check the place and the credentials in records_url"
IS_IT_UP = "Is it up, and its address in records_url right?"

# What drivers raise besides what SQLAlchemy makes of it, when a connection goes away under them.
FAILURES = (SQLAlchemyError, OSError, EOFError, RuntimeError, AttributeError)

T = TypeVar("T")


class _Failed(Exception):
    """A statement, or the connection for it, failed."""

    def __init__(self, answer: Answer, problem: str) -> None:
        super().__init__(problem)
        self.answer = answer


class SqlRecords(RecordStore):
    """The records in the table `shalekv_records`, which is made when it is first needed."""

    def __init__(self, place: SqlPlace, limits: Limits) -> None:
        """Raises `ImportError` when the driver is not installed."""
        self.url = place.shown
        self.sent = RequestCounts()
        self._password = place.password
        self._limits = limits
        self._engine: AsyncEngine = open_engine(place, limits)
        self._running: set[asyncio.Task[Any]] = set()
        self._is_prepared = False
        self._preparing = asyncio.Lock()

    async def ensure_schema(self) -> None:
        async with self._preparing:
            if self._is_prepared:
                return
            try:
                await self._to_its_end(self._prepare())
            except _Failed as failed:
                raise self._error(failed, "prepare", RECORDS.name) from failed
            self._is_prepared = True

    async def _prepare(self) -> None:
        async with self._connected() as connection:
            await self._timed(prepare(connection, self.url))

    async def insert(self, record: Record) -> InsertOutcome:
        statement = insert(RECORDS).values(
            database=record.destination.database,
            destination=record.destination.name,
            source=record.source,
            committed=record.is_committed,
        )
        for _ in range(INSERTS_MAX):
            try:
                await self._change(statement)
            except _Failed as failed:
                if failed.answer is Answer.UNKNOWN:
                    return InsertUnknown(f"{self.url}: {failed}")
                if failed.answer is not Answer.CONFLICT:
                    raise self._error(failed, "insert", str(record.destination)) from failed
            else:
                return Inserted()
            if (found := await self.find(record.destination)) is not None:
                return Occupied(found)
        problem = f"another record came and went {INSERTS_MAX} times"
        raise StoreUnavailable(self.url, "insert", str(record.destination), problem)

    async def find(self, destination: Destination) -> Record | None:
        statement = select(RECORDS).where(_is(destination))
        for row in await self._read("find", str(destination), statement):
            return Record(destination, row.source, row.committed)
        return None

    async def commit(self, record: Record) -> bool:
        statement = (
            update(RECORDS)
            .where(_is(record.destination))
            .where(RECORDS.c.source == record.source)
            .values(committed=True)
        )
        return await self._changed("commit", record, statement)

    async def take_over(self, record: Record, source: str) -> bool:
        statement = (
            update(RECORDS)
            .where(_is(record.destination))
            .where(RECORDS.c.source == record.source)
            .where(RECORDS.c.committed.is_(False))
            .values(source=source)
        )
        return await self._changed("take_over", record, statement)

    async def withdraw(self, record: Record) -> None:
        statement = (
            delete(RECORDS)
            .where(_is(record.destination))
            .where(RECORDS.c.source == record.source)
            .where(RECORDS.c.committed.is_(False))
        )
        await self._changed("withdraw", record, statement)

    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        by_database: dict[str, list[str]] = defaultdict(list)
        for each in destinations:
            by_database[each.database].append(each.name)
        for database, names in by_database.items():
            for first in range(0, len(names), DELETED_AT_ONCE):
                await self._delete(database, names[first : first + DELETED_AT_ONCE])

    async def _delete(self, database: str, names: Sequence[str]) -> None:
        statement = (
            delete(RECORDS)
            .where(RECORDS.c.database == database)
            .where(RECORDS.c.destination.in_(names))
            .where(RECORDS.c.committed.is_(True))
        )
        try:
            await self._change(statement)
        except _Failed as failed:
            raise self._error(failed, "delete", f"{database}/{names[0]}") from failed

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[Record]:
        after = ""
        is_last = False
        while not is_last:
            statement = (
                select(RECORDS)
                .where(RECORDS.c.database == database)
                .where(RECORDS.c.destination > after)
                .order_by(RECORDS.c.destination)
                .limit(PAGE_RECORDS)
            )
            if uncommitted_only:
                statement = statement.where(RECORDS.c.committed.is_(False))
            rows = await self._read("list", database, statement)
            is_last = len(rows) < PAGE_RECORDS
            for row in rows:
                after = row.destination
                yield Record(Destination(database, after), row.source, row.committed)

    async def close(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._engine.dispose()

    async def _read(self, operation: str, name: str, statement: Executable) -> Sequence[Any]:
        await self.ensure_schema()
        self.sent.add(RequestKind.RECORD_READ)
        try:
            return [*await self._to_its_end(self._execute(statement))]
        except _Failed as failed:
            raise self._error(failed, operation, name) from failed

    async def _changed(self, operation: str, record: Record, statement: Executable) -> bool:
        """Whether the statement met its record."""
        try:
            return (await self._change(statement)).rowcount > 0
        except _Failed as failed:
            raise self._error(failed, operation, str(record.destination)) from failed

    async def _change(self, statement: Executable) -> CursorResult[Any]:
        """Raises `_Failed`."""
        await self.ensure_schema()
        self.sent.add(RequestKind.RECORD_WRITE)
        return await self._to_its_end(self._execute(statement))

    async def _execute(self, statement: Executable) -> CursorResult[Any]:
        async with self._connected() as connection:
            result = await self._timed(connection.execute(statement))
            assert isinstance(result, CursorResult)
            return result

    async def _to_its_end(self, statement: Coroutine[Any, Any, T]) -> T:
        """What it comes to. Whoever is cancelled stops waiting, and the statement goes on.

        Drivers lose a connection whose statement is cancelled, or worse.
        """
        task = asyncio.create_task(statement)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(_look_at)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        """A connection; to get none means that nothing was sent."""
        connection = self._engine.connect()
        try:
            await self._timed(connection.start())
        except _Failed as failed:
            refused = failed.answer is Answer.REFUSED
            advice = CHECK_URL if refused else IS_IT_UP
            answer = Answer.REFUSED if refused else Answer.NOT_DONE
            raise _Failed(answer, f"{failed}. {advice}") from failed
        try:
            yield connection
        finally:
            await connection.close()

    async def _timed(self, request: Any) -> Any:
        """What `request` comes to within the time limit; raises `_Failed`."""
        limit_ms = self._limits.request_timeout_ms
        timeout = asyncio.timeout(limit_ms / 1_000)
        try:
            async with timeout:
                return await request
        except FAILURES as error:
            if timeout.expired():
                raise _Failed(Answer.UNKNOWN, f"no answer within {limit_ms} ms") from None
            # From None: what led to it may quote the password, which tracebacks would show.
            raise _Failed(answer_in(error), self._said(error)) from None

    def _said(self, error: BaseException) -> str:
        text = str(getattr(error, "orig", None) or error) or type(error).__name__
        return text.replace(self._password, "***") if self._password else text

    def _error(self, failed: _Failed, operation: str, name: str) -> StoreError:
        kind = StoreRefused if failed.answer is Answer.REFUSED else StoreUnavailable
        return kind(self.url, operation, name, str(failed))


def _is(destination: Destination) -> ColumnElement[bool]:
    return and_(
        RECORDS.c.database == destination.database, RECORDS.c.destination == destination.name
    )


def _look_at(task: asyncio.Task[Any]) -> None:
    """Nobody may be waiting any more for what it raised."""
    if not task.cancelled():
        task.exception()
