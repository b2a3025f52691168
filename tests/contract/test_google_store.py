"""The store on Google keeps the contract of object stores, on an emulator."""

from __future__ import annotations

from itertools import count

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.obstores.opening import open_bucket
from shalekv.store.requests import RequestKind
from shalekv.store.url import BucketUrl, Provider
from tests.contract.bucket_contract import BucketContract
from tests.contract.listing import create_many
from tests.contract.opening import OpenStore, names_in
from tests.kit.inline_runtime import inline_runtime
from tests.servers.google import GoogleServer

numbers = count(1)


class TestGoogleStore(BucketContract):
    @pytest.fixture
    def open_store(self, google_server: GoogleServer) -> OpenStore:
        """Instances on one whole bucket that share nothing else."""
        bucket = f"bucket-{next(numbers)}"
        google_server.create_bucket(bucket)
        place = BucketUrl(Provider.GOOGLE, bucket, "")
        settings = StoreSettings(endpoint_url=google_server.endpoint, anonymous=True)
        return lambda: open_bucket(place, inline_runtime(), settings)

    async def test_requests_are_counted(self, store: ObjectStore) -> None:
        """Deletes count by the object, lists by the page, the clock as a write and a read."""
        names = [f"wal/{number:04d}" for number in range(1_001)]
        await create_many(store, names)
        before = dict(store.sent.by_kind)
        assert len(await names_in(store, "wal/")) == len(names)
        await store.delete(names[:30])
        await store.now_ms()
        spent = {kind: store.sent.by_kind[kind] - before[kind] for kind in RequestKind}
        assert {kind: number for kind, number in spent.items() if number} == {
            RequestKind.LIST: 2,
            RequestKind.DELETE: 30,
            RequestKind.WRITE: 1,
            RequestKind.READ: 1,
        }
