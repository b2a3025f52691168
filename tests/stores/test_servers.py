"""The suites on real servers of each kind of object store."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store as open_any
from tests.contract.opening import OpenStore
from tests.kit.processes.in_process import real_runtime
from tests.servers.azurite import AzureServer
from tests.servers.fixtures import BUCKET
from tests.servers.google import GoogleServer
from tests.servers.s3 import S3Server
from tests.stores.engine_suite import EngineSuite
from tests.stores.fencing_suite import FencingSuite


def opener(scheme: str, endpoint_url: str, *, anonymous: bool = False) -> Iterator[OpenStore]:
    """Stores on one new folder of the bucket."""
    settings = StoreSettings(endpoint_url=endpoint_url, anonymous=anonymous)
    url = f"{scheme}://{BUCKET}/{uuid4()}"
    with real_runtime() as runtime:
        yield lambda: open_any(url, runtime, settings)


class TestOnS3(FencingSuite, EngineSuite):
    @pytest.fixture
    def open_store(
        self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OpenStore]:
        """On versitygw."""
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
        yield from opener("s3", s3_server.endpoint)


class TestOnSimulatedS3(FencingSuite):
    @pytest.fixture
    def open_store(
        self, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OpenStore]:
        """On moto."""
        for name, value in moto_server.environment.items():
            monkeypatch.setenv(name, value)
        yield from opener("s3", moto_server.endpoint)


class TestOnAzure(FencingSuite):
    @pytest.fixture
    def open_store(
        self, azure_server: AzureServer, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OpenStore]:
        """On Azurite."""
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azure_server.account)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azure_server.key)
        yield from opener("az", azure_server.endpoint)


class TestOnGoogle(FencingSuite):
    @pytest.fixture
    def open_store(self, google_server: GoogleServer) -> Iterator[OpenStore]:
        """On fake-gcs-server."""
        yield from opener("gs", google_server.endpoint, anonymous=True)
