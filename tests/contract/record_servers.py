"""Record stores of each kind, on the servers that all tests share."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from shalekv.store.two_phase.sql_table import TABLE_NAME
from tests.contract.opening_records import opener
from tests.contract.record_contract import OpenRecords
from tests.servers.dynamodb import DynamoServer
from tests.servers.mariadb import MariaServer
from tests.servers.postgres import PostgresServer
from tests.servers.s3 import S3Server


@pytest.fixture
def sqlite_records(tmp_path: Path) -> OpenRecords:
    """Connections of their own to one new file."""
    return opener(f"sqlite://{tmp_path}/records.db")


@pytest.fixture
async def maria_records(maria_server: MariaServer) -> OpenRecords:
    """Connections of their own to one database without a table."""
    await _drop_table(maria_server.url())
    return opener(maria_server.url("mysql"))


@pytest.fixture
async def postgres_records(postgres_server: PostgresServer) -> OpenRecords:
    """As of MariaDB."""
    await _drop_table(postgres_server.url())
    return opener(postgres_server.url("postgresql"))


@pytest.fixture
def dynamo_records(dynamo_server: DynamoServer, monkeypatch: pytest.MonkeyPatch) -> OpenRecords:
    """Clients of their own on one name of a table that is not there yet."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", dynamo_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", dynamo_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", dynamo_server.region)
    return opener(f"dynamodb://records-{uuid4().hex}", endpoint_url=dynamo_server.endpoint)


@pytest.fixture
def moto_records(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> OpenRecords:
    """As of DynamoDB Local."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto_server.region)
    return opener(f"dynamodb://records-{uuid4().hex}", endpoint_url=moto_server.endpoint)


async def _drop_table(url: str) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.execute(text(f"DROP TABLE IF EXISTS {TABLE_NAME}"))
    await engine.dispose()
