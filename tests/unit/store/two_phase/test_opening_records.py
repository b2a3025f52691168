"""Records are opened by a URL, which may hold a password that must not be shown."""

from __future__ import annotations

import sqlite3
import traceback
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from shalekv.errors import InvalidSetting, StoreError, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.two_phase import sql
from shalekv.store.two_phase.opening import open_records
from shalekv.store.two_phase.records import Inserted, RecordStore
from shalekv.store.two_phase.sql import prepare
from tests.kit.inline_runtime import inline_runtime

SECRET = "SENTINEL-p4ss"
RECORD = CreateRecord(Destination("s3://bucket", "wal/1"), "wal/1.source")


def opened(records_url: str) -> RecordStore:
    settings = StoreSettings(cas=CasChoice.TWO_PHASE, records_url=records_url)
    return open_records(inline_runtime(), settings)


class Racing:
    """A connection on which the table cannot be created, since another process has created it, or
    not.
    """

    dialect = SQLiteDialect()

    def __init__(self, *, is_made: bool) -> None:
        absent = DBAPIError("", None, sqlite3.OperationalError("no such table"))
        duplicate = DBAPIError("", None, sqlite3.OperationalError("duplicate"))
        self._outcomes = [absent, duplicate, *([] if is_made else [absent])]

    async def execute(self, _statement: object) -> None:
        if self._outcomes:
            raise self._outcomes.pop(0)


async def test_two_that_make_the_table_at_once() -> None:
    """A process that hears that the table already exists, as from PostgreSQL, goes on; other errors
    are raised.
    """
    await prepare(cast("AsyncConnection", Racing(is_made=True)), "sqlite")
    with pytest.raises(DBAPIError, match="duplicate"):
        await prepare(cast("AsyncConnection", Racing(is_made=False)), "sqlite")


@pytest.mark.parametrize(
    ("records_url", "shown"),
    [
        ("dynamodb://records", "dynamodb://records"),
        ("sqlite:///var/lib/records.db", "sqlite:///var/lib/records.db"),
        ("sqlite:////var/lib/records.db", "sqlite:///var/lib/records.db"),
        (f"mysql://me:{SECRET}@host/db", "mysql://host/db"),
        (f"mariadb://me:{SECRET}@host:3307/db", "mysql://host:3307/db"),
        (f"postgresql://me:{SECRET}%40%2F@host/db?tls=on", "postgresql://host/db"),
        (f"postgres://me:{SECRET}@[::1]:5433/db", "postgresql://::1:5433/db"),
    ],
)
async def test_urls(records_url: str, shown: str) -> None:
    """The URL of the records is shown without user and password."""
    records = opened(records_url)
    assert records.url == shown
    assert SECRET not in repr(records)
    assert SECRET not in repr(vars(records).get("_engine"))
    await records.close()


@pytest.mark.parametrize(
    ("records_url", "problem"),
    [
        ("", "set records_url to dynamodb://TABLE"),
        ("records.db", "names no transactional store"),
        (f"oracle://me:{SECRET}@host/db", "names no transactional store"),
        (f"mysql://me:{SECRET}@/db", "no host"),
        (f"mysql://me:{SECRET}@host", "no database"),
        (f"mysql://me:{SECRET}@host/db/more", "no database"),
        (f"mysql://me:{SECRET}@host/db?ssl=yes", "no options but"),
        (f"mysql://me:{SECRET}@host:port/db", "cannot be read"),
        (f"mysql://me:{SECRET}/more@host/db", "cannot be read"),
        (f"mysql://me:{SECRET}@[host/db", "cannot be read"),
        ("sqlite://records.db", "names no file"),
        ("sqlite://", "names no file"),
        ("sqlite:///var/lib/../records.db", "names no file"),
        ("sqlite:///var/lib/", "names no file"),
        ("sqlite:///records.db?mode=memory", "names no file"),
        ("dynamodb://", "names no table"),
        ("dynamodb://a/b", "names no table"),
        ("dynamodb://a b c", "names no table"),
    ],
)
def test_bad_urls(records_url: str, problem: str) -> None:
    """An invalid URL is refused with advice on what to write, and never quoted."""
    with pytest.raises(InvalidSetting, match=problem) as raised:
        opened(records_url)
    shown = "".join(traceback.format_exception(raised.value))
    assert SECRET not in shown


@pytest.mark.parametrize("scheme", ["mysql", "postgresql"])
async def test_a_server_that_is_down(scheme: str) -> None:
    """Without a connection nothing was inserted, and the error holds no password."""
    records = opened(f"{scheme}://me:{SECRET}@127.0.0.1:1/db")
    with pytest.raises(StoreError, match=f"{scheme}://127.0.0.1:1/db: prepare") as raised:
        await records.insert(RECORD)
    shown = "".join(traceback.format_exception(raised.value))
    assert SECRET not in shown
    await records.close()


def test_a_file_in_no_folder() -> None:
    """A mistyped path is refused: a new file elsewhere would see no conflicts."""
    with pytest.raises(InvalidSetting, match="/nowhere/at/all, which is no folder"):
        opened("sqlite:///nowhere/at/all/records.db")


async def test_a_file_of_something_else(tmp_path: Path) -> None:
    """A file that is no database is refused, and is left as it is."""
    path = tmp_path / "records.db"
    path.write_bytes(b"something else " * 100)
    records = opened(f"sqlite://{path}")
    with pytest.raises(StoreRefused, match="file is not a database"):
        await records.insert(RECORD)
    assert path.read_bytes() == b"something else " * 100
    await records.close()


async def test_a_database_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process holds the lock nothing is inserted, and a retry is possible."""
    monkeypatch.setattr(sql, "SQLITE_BUSY_MS", 10)
    records = opened(f"sqlite://{tmp_path}/records.db")
    await records.ensure_schema()
    with closing(sqlite3.connect(tmp_path / "records.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable, match="locked"):
            await records.insert(RECORD)
        other.execute("ROLLBACK")
    assert await records.insert(RECORD) == Inserted()
    await records.close()
