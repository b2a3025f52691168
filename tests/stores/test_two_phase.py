"""The suites on two-phase compare-and-swap, over an S3 server of which no condition is asked.

(s3rver, which knows none, is no store for this: of copies and deletes at once it loses some.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.opening import open_store as open_any
from tests.contract.opening import OpenStore
from tests.e2e.in_process import real_runtime
from tests.servers.dynamodb import DynamoServer, dynamodb_local
from tests.servers.mariadb import mariadb
from tests.servers.postgres import postgres
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw
from tests.stores.engine_suite import EngineSuite
from tests.stores.fencing_suite import FencingSuite

BUCKET = "two-phase"


@pytest.fixture(scope="module")
def plain_server() -> Iterator[S3Server]:
    """A server with a bucket; a PUT without a condition overwrites."""
    with versitygw() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def dynamo_server() -> Iterator[DynamoServer]:
    """DynamoDB."""
    with dynamodb_local() as server:
        yield server


@pytest.fixture(scope="module")
def maria_url() -> Iterator[str]:
    """MariaDB."""
    with mariadb() as server:
        yield server.url("mysql")


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """PostgreSQL."""
    with postgres() as server:
        yield server.url("postgresql")


class OnTwoPhases(FencingSuite, EngineSuite):
    @pytest.fixture
    def records(self) -> StoreSettings:
        """The settings that say where records are."""
        raise AssertionError("a class that tests a transactional store overrides this fixture")

    @pytest.fixture
    def open_store(
        self, plain_server: S3Server, records: StoreSettings, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OpenStore]:
        """Stores on one new folder of the bucket."""
        for name, value in plain_server.environment.items():
            monkeypatch.setenv(name, value)
        given = {"cas": CasChoice.TWO_PHASE, "endpoint_url": plain_server.endpoint}
        settings = records.model_copy(update=given)
        url = f"s3://{BUCKET}/{uuid4()}"
        with real_runtime() as runtime:
            yield lambda: open_any(url, runtime, settings)


class TestBySqlite(OnTwoPhases):
    @pytest.fixture
    def records(self, tmp_path: Path) -> StoreSettings:
        """A file."""
        return StoreSettings(records_url=f"sqlite://{tmp_path}/records.db")


class TestByMariaDb(OnTwoPhases):
    @pytest.fixture
    def records(self, maria_url: str) -> StoreSettings:
        """One table for the databases of all tests."""
        return StoreSettings(records_url=maria_url)


class TestByPostgres(OnTwoPhases):
    @pytest.fixture
    def records(self, postgres_url: str) -> StoreSettings:
        """One table for the databases of all tests."""
        return StoreSettings(records_url=postgres_url)


class TestByDynamoDb(OnTwoPhases):
    @pytest.fixture
    def records(self, dynamo_server: DynamoServer) -> StoreSettings:
        """One table for the databases of all tests; it knows one pair of keys, as S3 does."""
        return StoreSettings(
            records_url="dynamodb://records", records_endpoint_url=dynamo_server.endpoint
        )
