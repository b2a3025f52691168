"""Servers that are started once, when the first test wants one; each object store has `BUCKET`.

That of Kubernetes runs in the event loop of a test, and each test has its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.servers.kubernetes import KubernetesApi, kubernetes_api
from tests.servers.object_stores import (
    AzureServer,
    GoogleServer,
    azurite,
    google,
    minio,
    moto,
    versitygw,
)
from tests.servers.record_stores import (
    DynamoServer,
    EtcdServer,
    MariaServer,
    PostgresServer,
    dynamodb_local,
    etcd,
    mariadb,
    postgres,
)
from tests.servers.s3 import S3Server

BUCKET = "tests"  # a test uses a folder of it that no other test has


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real server, whose conditions hold under races."""
    with versitygw() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def minio_server() -> Iterator[S3Server]:
    """MinIO, for long tests only."""
    with minio() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """A simulated one, which takes one request at a time; it has DynamoDB, too."""
    with moto() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    """Azurite."""
    with azurite() as server:
        server.create_container(BUCKET)
        yield server


@pytest.fixture(scope="session")
def google_server() -> Iterator[GoogleServer]:
    """An emulator of Google's storage."""
    with google() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def maria_server() -> Iterator[MariaServer]:
    """MariaDB."""
    with mariadb() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """PostgreSQL."""
    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def dynamo_server() -> Iterator[DynamoServer]:
    """DynamoDB Local."""
    with dynamodb_local() as server:
        yield server


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    """A real etcd, of one member."""
    with etcd() as server:
        yield server


@pytest.fixture
async def kubernetes(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    """An API server of Kubernetes without Leases."""
    async with kubernetes_api(tmp_path / "kubernetes") as api:
        yield api
