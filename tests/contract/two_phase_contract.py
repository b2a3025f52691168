"""The contract of object stores for two-phase compare-and-swap on S3: no condition is ever sent."""

from __future__ import annotations

from collections.abc import Iterator
from random import SystemRandom
from uuid import uuid4

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, ObjectStore
from shalekv.store.requests import RequestKind
from shalekv.store.s3.store import S3Store
from shalekv.store.two_phase.store import TwoPhaseStore
from shalekv.store.url import BucketUrl, Provider
from tests.contract.listing import create_many
from tests.contract.opening import OpenStore, names_in
from tests.contract.record_contract import OpenRecords
from tests.contract.store_contract import StoreContract
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server

THREADS = 1
SOME = 60


class TwoPhaseContract(StoreContract):
    """A subclass brings `open_records`. Stores share neither connections nor anything else."""

    clock_slack_ms = 2_000
    passing_objects = 8
    rounds = 12

    @pytest.fixture
    def open_records(self) -> OpenRecords:
        """The records under test."""
        raise AssertionError("a class that tests a record store overrides this fixture")

    @pytest.fixture
    def open_store(
        self,
        s3_server: S3Server,
        open_records: OpenRecords,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[OpenStore]:
        """Stores on one new folder of the bucket."""
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
        place = BucketUrl(Provider.S3, BUCKET, f"new/{uuid4()}")
        workers = ThreadWorkers(THREADS)
        runtime = Runtime(LoopClock(), SystemRandom(), workers)
        settings = StoreSettings(endpoint_url=s3_server.endpoint)
        yield lambda: TwoPhaseStore(S3Store(place, runtime, settings), open_records(), runtime)
        workers.close()

    async def test_long_lists(self, store: ObjectStore, rival: ObjectStore) -> None:
        """Lists are those of the plain store, whose contract has long ones; this one is short."""
        names = [f"wal/{number:020d}.sst" for number in range(SOME)]
        await create_many(store, names)
        assert await names_in(rival, "wal/") == names
        assert await names_in(rival, "wal/", names[9]) == names[10:]

    async def test_a_create_has_its_price(self, store: ObjectStore) -> None:
        """A create is two puts, two writes of records and one delete, when all goes well."""
        await store.recover()
        before = dict(store.sent.by_kind)
        assert await store.create("wal/1.sst", b"1") == Created()
        spent = {kind: store.sent.by_kind[kind] - before[kind] for kind in RequestKind}
        assert {kind: count for kind, count in spent.items() if count} == {
            RequestKind.WRITE: 2,
            RequestKind.RECORD_WRITE: 2,
            RequestKind.DELETE: 1,
        }
