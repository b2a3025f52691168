"""A connection that is cut in the midst of a statement leaves a doubt, and nothing worse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.store.two_phase.records import Inserted, InsertUnknown, RecordStore
from tests.contract.record_contract import OpenRecords, record
from tests.servers.mariadb import MariaServer
from tests.servers.postgres import PostgresServer

INSERT = (
    "INSERT INTO shalekv_records (database, destination, source, committed) "
    "VALUES ('s3://bucket/here', 'wal/1', 'theirs', FALSE)"
)
MARIA_INSERT = INSERT.replace("(database,", "(`database`,")
MARIA_WAITING = "SELECT id FROM information_schema.processlist WHERE info LIKE 'INSERT INTO shale%'"
POSTGRES_WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


@pytest.fixture
async def maria(maria_server: MariaServer) -> AsyncIterator[AsyncConnection]:
    """A connection of somebody else, in a transaction."""
    engine = create_async_engine(maria_server.url())
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


@pytest.fixture
async def postgres_rival(postgres_server: PostgresServer) -> AsyncIterator[AsyncConnection]:
    """As above."""
    engine = create_async_engine(postgres_server.url())
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


async def cut(
    records: RecordStore, rival: AsyncConnection, insert: str, waiting: str, kill: str
) -> object:
    """What an insert is told that waits for a rival's transaction when its connection is cut."""
    await records.ensure_schema()
    await rival.execute(text(insert))
    inserting = asyncio.create_task(records.insert(record("wal/1", "ours")))
    found = None
    while found is None:
        await asyncio.sleep(0)
        found = (await rival.execute(text(waiting))).scalar()
    await rival.execute(text(kill.format(found)))
    outcome = await inserting
    await rival.rollback()
    return outcome


async def test_mariadb(maria_records: OpenRecords, maria: AsyncConnection) -> None:
    """A connection that MariaDB kills is a doubt; the next statement has another connection."""
    records = maria_records()
    outcome = await cut(records, maria, MARIA_INSERT, MARIA_WAITING, "KILL CONNECTION {}")
    assert isinstance(outcome, InsertUnknown)
    assert await records.find(record("wal/1").destination) is None
    assert await records.insert(record("wal/1", "ours")) == Inserted()
    await records.close()


async def test_postgres(postgres_records: OpenRecords, postgres_rival: AsyncConnection) -> None:
    """A connection that PostgreSQL ends is a doubt; the next statement has another connection."""
    records = postgres_records()
    kill = "SELECT pg_terminate_backend({})"
    outcome = await cut(records, postgres_rival, INSERT, POSTGRES_WAITING, kill)
    assert isinstance(outcome, InsertUnknown)
    assert await records.find(record("wal/1").destination) is None
    assert await records.insert(record("wal/1", "ours")) == Inserted()
    await records.close()


async def test_a_table_that_was_dropped(
    postgres_records: OpenRecords, postgres_rival: AsyncConnection
) -> None:
    """A table that goes away is not made again under a running process: that would free names."""
    records = postgres_records()
    await records.insert(record("wal/1"))
    await postgres_rival.execute(text("DROP TABLE shalekv_records"))
    await postgres_rival.commit()
    with pytest.raises((StoreRefused, StoreUnavailable), match="does not exist"):
        await records.insert(record("wal/1"))
    await records.close()
