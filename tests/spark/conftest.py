"""Fixtures of the pipeline's tests: one Spark, and databases on a folder and on a real S3."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession

from shalekv.protocol.manifest import Manifest
from tests.kit.processes.spark_session import started
from tests.kit.processes.wal_contents import current_manifest
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spark leaves sockets to the garbage collector, which warns."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for ignored in ("ignore::ResourceWarning", "ignore::DeprecationWarning:pyspark"):
                item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session", autouse=True)
def spark(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[SparkSession]:
    """One session for all tests. Its processes inherit the credentials of the S3 server.

    It starts before any test uses gRPC: threads of that may break the fork that starts the JVM.
    """
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.MonkeyPatch.context() as environment:
            _set(environment, s3_server)
            session = stack.enter_context(started(tmp_path_factory.mktemp("spark")))
        yield session


@dataclass(frozen=True, slots=True)
class SparkDatabase:
    """Place for the database of a test, which is empty yet."""

    url: str
    store: Mapping[str, str] = field(default_factory=dict)  # settings, as the pipeline takes them

    @property
    def env(self) -> dict[str, str]:
        return {f"SHALEKV_STORE__{name.upper()}": value for name, value in self.store.items()}

    def manifest(self) -> Manifest:
        """The current one of a database on a folder."""
        return current_manifest(Path(self.url.removeprefix("file://")))


@pytest.fixture
def folder(tmp_path: Path) -> SparkDatabase:
    """A folder."""
    return SparkDatabase(f"file://{tmp_path}/database")


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> SparkDatabase:
    """A real S3 server."""
    _set(monkeypatch, s3_server)
    return SparkDatabase(f"s3://{BUCKET}/spark-{uuid4().hex}", {"endpoint_url": s3_server.endpoint})


def _set(environment: pytest.MonkeyPatch, server: S3Server) -> None:
    for name, value in server.environment.items():
        environment.setenv(name, value)
