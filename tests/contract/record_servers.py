"""Record stores of each kind, on servers that are started once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from shalekv.store.two_phase.sql_table import TABLE_NAME
from tests.contract.opening_records import opener
from tests.contract.record_contract import OpenRecords
from tests.servers.dynamodb import DynamoServer, dynamodb_local
from tests.servers.mariadb import MariaServer, mariadb
from tests.servers.moto import moto
from tests.servers.postgres import PostgresServer, postgres
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw


@pytest.fixture(scope="session")
def plain_server() -> Iterator[S3Server]:
    """S3 with a bucket for what is created in two phases."""
    with versitygw() as server:
        server.create_bucket("two-phase")
        yield server


@pytest.fixture
def sqlite_records(tmp_path: Path) -> OpenRecords:
    """Connections of their own to one new file."""
    return opener(f"sqlite://{tmp_path}/records.db")


@pytest.fixture(scope="session")
def maria_server() -> Iterator[MariaServer]:
    """MariaDB."""
    with mariadb() as server:
        yield server


@pytest.fixture
async def maria_records(maria_server: MariaServer) -> OpenRecords:
    """Connections of their own to one database without a table."""
    await _drop_table(maria_server.url())
    return opener(maria_server.url("mysql"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """PostgreSQL."""
    with postgres() as server:
        yield server


@pytest.fixture
async def postgres_records(postgres_server: PostgresServer) -> OpenRecords:
    """As of MariaDB."""
    await _drop_table(postgres_server.url())
    return opener(postgres_server.url("postgresql"))


@pytest.fixture(scope="session")
def dynamo_server() -> Iterator[DynamoServer]:
    """DynamoDB Local."""
    with dynamodb_local() as server:
        yield server


@pytest.fixture
def dynamo_records(dynamo_server: DynamoServer, monkeypatch: pytest.MonkeyPatch) -> OpenRecords:
    """Clients of their own on one name of a table that is not there yet."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", dynamo_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", dynamo_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", dynamo_server.region)
    return opener(f"dynamodb://records-{uuid4().hex}", endpoint_url=dynamo_server.endpoint)


@pytest.fixture(scope="session")
def moto_dynamo_server() -> Iterator[DynamoServer]:
    """The simulation of DynamoDB."""
    with moto() as server:
        yield DynamoServer(server.endpoint, server.access_key, server.secret_key, server.region)


@pytest.fixture
def moto_records(moto_dynamo_server: DynamoServer, monkeypatch: pytest.MonkeyPatch) -> OpenRecords:
    """As of DynamoDB Local."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto_dynamo_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto_dynamo_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto_dynamo_server.region)
    return opener(f"dynamodb://records-{uuid4().hex}", endpoint_url=moto_dynamo_server.endpoint)


async def _drop_table(url: str) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.execute(text(f"DROP TABLE IF EXISTS {TABLE_NAME}"))
    await engine.dispose()
