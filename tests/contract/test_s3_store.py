"""The S3 store keeps the contract of object stores, on a real server and on a simulated one.

moto is run with one request at a time: it has no locks, so what it shows of races is that the
store tells their outcomes apart. That a condition holds under races is shown on versitygw.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import SystemRandom
from uuid import uuid4

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.contract.opening import OpenStore
from tests.contract.store_contract import StoreContract
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server

THREADS = 1  # reads the models of botocore


class S3Contract(StoreContract):
    # versitygw renews the Date of its replies once a second, and dates files by the kernel's ticks.
    clock_slack_ms = 2_000
    passing_objects = 40

    @pytest.fixture
    def server(self) -> S3Server:
        """The server under test."""
        raise AssertionError("a class that tests a server overrides this fixture")

    @pytest.fixture
    def open_store(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStore]:
        """Stores on one new folder of the bucket, which share a client as they do in a process."""
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = BucketUrl(Provider.S3, BUCKET, f"new/{uuid4()}")
        workers = ThreadWorkers(THREADS)
        runtime = Runtime(LoopClock(), SystemRandom(), workers)
        settings = StoreSettings(endpoint_url=server.endpoint)
        yield lambda: S3Store(place, runtime, settings)
        workers.close()


class TestOnVersitygw(S3Contract):
    @pytest.fixture
    def server(self, s3_server: S3Server) -> S3Server:
        """A real server, whose conditions hold under races."""
        return s3_server


class TestOnMoto(S3Contract):
    @pytest.fixture
    def server(self, moto_server: S3Server) -> S3Server:
        """A simulated one, which takes one request at a time."""
        return moto_server
