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
from tests.kit.processes.in_process import real_runtime
from tests.servers.dynamodb import DynamoServer
from tests.servers.fixtures import BUCKET
from tests.servers.mariadb import MariaServer
from tests.servers.postgres import PostgresServer
from tests.servers.s3 import S3Server
from tests.stores.engine_suite import EngineSuite
from tests.stores.fencing_suite import FencingSuite


class OnTwoPhases(FencingSuite, EngineSuite):
    @pytest.fixture
    def records(self) -> StoreSettings:
        """The settings that say where records are."""
        raise AssertionError("a class that tests a transactional store overrides this fixture")

    @pytest.fixture
    def open_store(
        self, s3_server: S3Server, records: StoreSettings, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OpenStore]:
        """Stores on one new folder of the bucket."""
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
        given = {"cas": CasChoice.TWO_PHASE, "endpoint_url": s3_server.endpoint}
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
    def records(self, maria_server: MariaServer) -> StoreSettings:
        """One table for the databases of all tests."""
        return StoreSettings(records_url=maria_server.url("mysql"))


class TestByPostgres(OnTwoPhases):
    @pytest.fixture
    def records(self, postgres_server: PostgresServer) -> StoreSettings:
        """One table for the databases of all tests."""
        return StoreSettings(records_url=postgres_server.url("postgresql"))


class TestByDynamoDb(OnTwoPhases):
    @pytest.fixture
    def records(self, dynamo_server: DynamoServer) -> StoreSettings:
        """One table for the databases of all tests; it knows one pair of keys, as S3 does."""
        return StoreSettings(
            records_url="dynamodb://records", records_endpoint_url=dynamo_server.endpoint
        )
