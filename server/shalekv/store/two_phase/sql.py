"""Records in a table of an SQL database: SQLite, MySQL, MariaDB or PostgreSQL.

    shalekv_records
      database      the URL of the store        these two are the primary key
      destination   the name of the object
      source        the name of the temporary object in the same database
      committed     whether the destination has been made

Keys compare by their bytes in every database: a collation for letters could take two databases,
or two objects, for one.

Connections are set up so that an answered change is durable and visible to all. Every statement is
a transaction of its own: its condition and its change are one step, and no older snapshot is read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import (
    URL,
    Boolean,
    Column,
    ColumnElement,
    CursorResult,
    Dialect,
    Executable,
    MetaData,
    Table,
    Text,
    and_,
    delete,
    event,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects.mysql import VARBINARY
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import TypeDecorator, TypeEngine

from shalekv.errors import StoreError, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.store.retry import CONNECT_TIMEOUT_MS
from shalekv.store.two_phase.records import (
    PAGE_RECORDS,
    Inserted,
    InsertOutcome,
    InsertUnknown,
    Occupied,
    RecordStore,
    StatementOutcome,
)

log = structlog.get_logger()

# The databases number their errors, each in its own way. An error that is not known to be an
# answer counts as none: the statement may have been carried out, or may still be.
SQLITE_NOT_DONE = frozenset({5, 6, 13})  # busy, locked, disk full
SQLITE_REFUSED = frozenset({1, 3, 8, 14, 23, 26})  # no such table, permission, read-only, no file

# Errors of the server, but for those of a connection or a commit that was cut short.
MYSQL_SERVER = (range(1000, 2000), range(3000, 5000))
MYSQL_UNKNOWN = frozenset({1053, 1080, *range(1152, 1162), 1180, 1184, 1317, 1927, 1969, 3024})
# No such user, database, table or column, no permission, read-only.
MYSQL_REFUSED = frozenset(
    {1044, 1045, 1049, 1054, 1142, 1143, 1146, 1227, 1290, 1698, 1792, 1820, 1836, 3118}
)

POSTGRES_UNKNOWN = ("08", "57P", "40003", "58", "XX")
# Authorization, no such database, syntax or permission, read-only.
POSTGRES_REFUSED = ("28", "3D", "3F", "42", "25006")

SQLITE_BUSY_MS = 10_000
RECYCLE_S = 1_800  # before firewalls and servers drop idle connections

# InnoDB allows 3,072 bytes for a key. The longest URL has a folder in which every character is
# escaped: 5 + 222 + 1 + 3 * 400. Names end at 512 bytes.
DATABASE_BYTES = 1_500
NAME_BYTES = 640
TABLE_NAME = "shalekv_records"

# Settings of servers, and the values with which a commit survives a power cut.
DURABLE = {
    "mysql": ("SELECT @@GLOBAL.innodb_flush_log_at_trx_commit", "1"),
    "postgresql": ("SHOW fsync", "on"),
}

DELETE_BATCH = 200
INSERTS_MAX = 4
CHECK_URL = "Check the place and the credentials in records_url"
IS_IT_UP = "Is it up, and its address in records_url right?"

# Errors that drivers raise when a connection is lost, beside those of SQLAlchemy.
FAILURES = (SQLAlchemyError, OSError, EOFError, RuntimeError, AttributeError)

T = TypeVar("T")


def outcome_of(error: BaseException) -> StatementOutcome:
    """Return what `error` says about the statement that raised it."""
    if isinstance(error, IntegrityError):
        return StatementOutcome.CONFLICT
    original = error.orig if isinstance(error, DBAPIError) else error
    sqlstate = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if isinstance(sqlstate, str):
        return _postgres(sqlstate)
    sqlite_code = getattr(original, "sqlite_errorcode", None)
    if isinstance(sqlite_code, int):
        return _sqlite(sqlite_code & 0xFF)
    arguments = getattr(original, "args", ())
    if arguments and isinstance(arguments[0], int) and not isinstance(original, OSError):
        return _mysql(arguments[0])
    return StatementOutcome.UNKNOWN


def _postgres(sqlstate: str) -> StatementOutcome:
    if sqlstate.startswith(POSTGRES_UNKNOWN):
        return StatementOutcome.UNKNOWN
    return (
        StatementOutcome.REFUSED
        if sqlstate.startswith(POSTGRES_REFUSED)
        else StatementOutcome.NOT_DONE
    )


def _sqlite(code: int) -> StatementOutcome:
    if code in SQLITE_REFUSED:
        return StatementOutcome.REFUSED
    return StatementOutcome.NOT_DONE if code in SQLITE_NOT_DONE else StatementOutcome.UNKNOWN


def _mysql(code: int) -> StatementOutcome:
    if code in MYSQL_UNKNOWN or not any(code in numbers for numbers in MYSQL_SERVER):
        return StatementOutcome.UNKNOWN
    return StatementOutcome.REFUSED if code in MYSQL_REFUSED else StatementOutcome.NOT_DONE


@dataclass(frozen=True, slots=True)
class SqlPlace:
    """Address of an SQL database. `driver` is a name of SQLAlchemy's."""

    driver: str
    host: str = ""
    port: int | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    database: str = ""
    path: Path | None = None  # of SQLite
    is_encrypted: bool = False

    @property
    def shown(self) -> str:
        """The URL without user and password."""
        scheme = self.driver.partition("+")[0]
        if self.path is not None:
            return f"{scheme}://{self.path}"
        port = "" if self.port is None else f":{self.port}"
        return f"{scheme}://{self.host}{port}/{self.database}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the connections to a database."""

    connections_max: int
    request_timeout_ms: int


def open_engine(place: SqlPlace, limits: Limits) -> AsyncEngine:
    """Open an engine, without connecting yet. Raises `ImportError` without the driver."""
    engine = create_async_engine(
        _url(place),
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,
        # SQLite has one writer at a time: others would poll.
        pool_size=limits.connections_max if place.path is None else 1,
        max_overflow=0,
        pool_timeout=limits.request_timeout_ms / 1_000,
        pool_pre_ping=True,
        pool_recycle=RECYCLE_S,
        connect_args=_connect_args(place),
    )
    if place.path is not None:
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _url(place: SqlPlace) -> URL:
    if place.path is not None:
        return URL.create(place.driver, database=str(place.path))
    return URL.create(
        place.driver,
        username=place.user or None,
        password=place.password or None,
        host=place.host,
        port=place.port,
        database=place.database,
    )


def _connect_args(place: SqlPlace) -> dict[str, Any]:
    timeout_s = CONNECT_TIMEOUT_MS / 1_000
    encryption = {"ssl": ssl.create_default_context()} if place.is_encrypted else {}
    match place.driver.partition("+")[0]:
        case "postgresql":
            # The server may be configured to answer before a commit is on its disk.
            durable = {"server_settings": {"synchronous_commit": "on"}}
            return {"timeout": timeout_s, **durable, **encryption}
        case "mysql":
            return {"connect_timeout": max(1, round(timeout_s)), **encryption}
        case _:
            return {}


def _prepare_sqlite(connection: Any, _entry: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_MS}")
        # With the rollback journal, FULL does not sync the folder after a commit: EXTRA does.
        cursor.execute("PRAGMA synchronous = EXTRA")
    finally:
        cursor.close()


class Bytewise(TypeDecorator[Any]):
    """ASCII text that compares and orders by its bytes, including spaces at its end."""

    impl = Text
    cache_ok = True

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose bytes in MySQL and MariaDB, text with the collation C in PostgreSQL."""
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(VARBINARY(self.max_bytes))
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Text(collation="C"))
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | bytes | None:
        """Convert a value for the driver."""
        if value is not None and dialect.name in {"mysql", "mariadb"}:
            return value.encode("ascii")
        return value

    def process_result_value(self, value: str | bytes | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Convert the driver's value to text."""
        return value.decode("ascii") if isinstance(value, bytes) else value


RECORDS = Table(
    TABLE_NAME,
    MetaData(),
    Column("database", Bytewise(DATABASE_BYTES), primary_key=True),
    Column("destination", Bytewise(NAME_BYTES), primary_key=True),
    Column("source", Bytewise(NAME_BYTES), nullable=False),
    Column("committed", Boolean, nullable=False),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)


async def prepare(connection: AsyncConnection, url: str) -> None:
    """Create the table if there is none, and warn if the server can lose commits.

    A user without the permission to create tables can use one that an administrator has made.
    Raises the errors of SQLAlchemy.
    """
    if not await _has_table(connection):
        try:
            await connection.execute(CreateTable(RECORDS, if_not_exists=True))
        except DBAPIError:
            # When two processes create it at once, PostgreSQL reports a duplicate to one of them.
            if not await _has_table(connection):
                raise
    await _warn_unless_durable(connection, url)


async def _has_table(connection: AsyncConnection) -> bool:
    # The table is read instead of the catalogue, so that a missing permission is an error.
    try:
        await connection.execute(select(RECORDS).limit(1))
    except DBAPIError as error:
        if error.connection_invalidated or not _is_absence(error):
            raise
        return False
    return True


def _is_absence(error: DBAPIError) -> bool:
    said = str(error.orig).lower()
    return "no such table" in said or "doesn't exist" in said or "does not exist" in said


async def _warn_unless_durable(connection: AsyncConnection, url: str) -> None:
    name = {"mariadb": "mysql"}.get(connection.dialect.name, connection.dialect.name)
    if name not in DURABLE:
        return
    query, wanted = DURABLE[name]
    found = str((await connection.execute(text(query))).scalar_one())
    if found != wanted:
        log.warning(
            "this server may forget records in a power cut, and a rival would overwrite objects",
            records=url,
            setting=query,
            found=found,
            wanted=wanted,
        )


class _Failed(Exception):
    """A statement, or the connection for it, failed."""

    def __init__(self, outcome: StatementOutcome, problem: str) -> None:
        super().__init__(problem)
        self.outcome = outcome


class SqlRecords(RecordStore):
    """The records in the table `shalekv_records`, which is created when it is first needed."""

    def __init__(self, place: SqlPlace, limits: Limits) -> None:
        """Connect to nothing yet. Raises `ImportError` when the driver is not installed."""
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
                await self._run_to_end(self._prepare())
            except _Failed as failed:
                raise self._error(failed, "prepare", RECORDS.name) from failed
            self._is_prepared = True

    async def _prepare(self) -> None:
        async with self._connected() as connection:
            await self._timed(prepare(connection, self.url))

    async def insert(self, record: CreateRecord) -> InsertOutcome:
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
                if failed.outcome is StatementOutcome.UNKNOWN:
                    return InsertUnknown(f"{self.url}: {failed}")
                if failed.outcome is not StatementOutcome.CONFLICT:
                    raise self._error(failed, "insert", str(record.destination)) from failed
            else:
                return Inserted()
            if (found := await self.find(record.destination)) is not None:
                return Occupied(found)
        problem = f"another record came and went {INSERTS_MAX} times"
        raise StoreUnavailable(self.url, "insert", str(record.destination), problem)

    async def find(self, destination: Destination) -> CreateRecord | None:
        statement = select(RECORDS).where(_is(destination))
        for row in await self._read("find", str(destination), statement):
            return CreateRecord(destination, row.source, row.committed)
        return None

    async def commit(self, record: CreateRecord) -> bool:
        statement = (
            update(RECORDS)
            .where(_is(record.destination))
            .where(RECORDS.c.source == record.source)
            .values(committed=True)
        )
        return await self._changed("commit", record, statement)

    async def take_over(self, record: CreateRecord, source: str) -> bool:
        statement = (
            update(RECORDS)
            .where(_is(record.destination))
            .where(RECORDS.c.source == record.source)
            .where(RECORDS.c.committed.is_(False))
            .values(source=source)
        )
        return await self._changed("take_over", record, statement)

    async def withdraw(self, record: CreateRecord) -> None:
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
            for first in range(0, len(names), DELETE_BATCH):
                await self._delete(database, names[first : first + DELETE_BATCH])

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

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[CreateRecord]:
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
                yield CreateRecord(Destination(database, after), row.source, row.committed)

    async def close(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._engine.dispose()

    async def _read(self, operation: str, name: str, statement: Executable) -> Sequence[Any]:
        await self.ensure_schema()
        self.sent.add(RequestKind.RECORD_READ)
        try:
            return [*await self._run_to_end(self._execute(statement))]
        except _Failed as failed:
            raise self._error(failed, operation, name) from failed

    async def _changed(self, operation: str, record: CreateRecord, statement: Executable) -> bool:
        """Execute a change; return whether a record fulfilled its conditions."""
        try:
            return (await self._change(statement)).rowcount > 0
        except _Failed as failed:
            raise self._error(failed, operation, str(record.destination)) from failed

    async def _change(self, statement: Executable) -> CursorResult[Any]:
        """Execute a change. Raises `_Failed`."""
        await self.ensure_schema()
        self.sent.add(RequestKind.RECORD_WRITE)
        return await self._run_to_end(self._execute(statement))

    async def _execute(self, statement: Executable) -> CursorResult[Any]:
        async with self._connected() as connection:
            result = await self._timed(connection.execute(statement))
            assert isinstance(result, CursorResult)
            return result

    async def _run_to_end(self, statement: Coroutine[Any, Any, T]) -> T:
        """Run a statement that continues when the caller is cancelled; return its result.

        Drivers lose a connection whose statement is cancelled, or worse.
        """
        task = asyncio.create_task(statement)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(_retrieve_exception)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection. Raises `_Failed` if there is none; nothing was sent then."""
        connection = self._engine.connect()
        try:
            await self._timed(connection.start())
        except _Failed as failed:
            refused = failed.outcome is StatementOutcome.REFUSED
            advice = CHECK_URL if refused else IS_IT_UP
            outcome = StatementOutcome.REFUSED if refused else StatementOutcome.NOT_DONE
            raise _Failed(outcome, f"{failed}. {advice}") from failed
        try:
            yield connection
        finally:
            await connection.close()

    async def _timed(self, request: Any) -> Any:
        """Return the result of `request` within the time limit. Raises `_Failed`."""
        limit_ms = self._limits.request_timeout_ms
        timeout = asyncio.timeout(limit_ms / 1_000)
        try:
            async with timeout:
                return await request
        except FAILURES as error:
            if timeout.expired():
                raise _Failed(StatementOutcome.UNKNOWN, f"no answer within {limit_ms} ms") from None
            # From None: the cause may quote the password, which tracebacks would show.
            raise _Failed(outcome_of(error), self._message(error)) from None

    def _message(self, error: BaseException) -> str:
        text = str(getattr(error, "orig", None) or error) or type(error).__name__
        return text.replace(self._password, "***") if self._password else text

    def _error(self, failed: _Failed, operation: str, name: str) -> StoreError:
        kind = StoreRefused if failed.outcome is StatementOutcome.REFUSED else StoreUnavailable
        return kind(self.url, operation, name, str(failed))


def _is(destination: Destination) -> ColumnElement[bool]:
    return and_(
        RECORDS.c.database == destination.database, RECORDS.c.destination == destination.name
    )


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Mark the exception of a task as retrieved: its caller may be gone."""
    if not task.cancelled():
        task.exception()
