"""The suites on real servers of each kind of object store."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store as open_any
from tests.contract.opening import OpenStore
from tests.e2e.in_process import real_runtime
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw
from tests.stores.engine_suite import EngineSuite
from tests.stores.fencing_suite import FencingSuite

BUCKET = "suites"


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """A server with a bucket."""
    with versitygw() as server:
        server.create_bucket(BUCKET)
        yield server


class TestOnS3(FencingSuite, EngineSuite):
    @pytest.fixture
    def open_store(
        self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OpenStore]:
        """Stores on one new folder of the bucket."""
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
        settings = StoreSettings(endpoint_url=s3_server.endpoint)
        url = f"s3://{BUCKET}/{uuid4()}"
        with real_runtime() as runtime:
            yield lambda: open_any(url, runtime, settings)
