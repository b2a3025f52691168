"""The store on Google keeps the contract of object stores, on an emulator."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.api import Created, ObjectStore
from shalekv.store.obstores.opening import open_bucket
from shalekv.store.requests import RequestKind
from shalekv.store.url import BucketUrl, Provider
from tests.contract.listing import create_many
from tests.contract.opening import OpenStore, names_in
from tests.contract.store_contract import StoreContract
from tests.servers.google import GoogleServer
from tests.unit.store.inline_runtime import inline_runtime

LARGE_BYTES = 64 * 1024 * 1024
numbers = count(1)


class TestGoogleStore(StoreContract):
    @pytest.fixture
    def open_store(self, google_server: GoogleServer) -> OpenStore:
        """Instances on one whole bucket that share nothing else."""
        bucket = f"bucket-{next(numbers)}"
        google_server.create_bucket(bucket)
        place = BucketUrl(Provider.GOOGLE, bucket, "")
        settings = StoreSettings(endpoint_url=google_server.endpoint, anonymous=True)
        return lambda: open_bucket(place, inline_runtime(), settings)

    async def test_metadata_is_kept(self, store: ObjectStore) -> None:
        """The epoch of the writer comes back with the object, and nothing else does."""
        await store.create("wal/1.sst", b"x", {"writer_epoch": "7"})
        assert dict((await store.get("wal/1.sst")).metadata) == {"writer_epoch": "7"}

    async def test_a_large_object_is_one_request(self, store: ObjectStore) -> None:
        """64 MiB are created on a condition, in one piece, and read as they were written."""
        data = Random(1).randbytes(LARGE_BYTES)
        assert await store.create("levels/1.sst", data) == Created()
        assert store.sent.by_kind[RequestKind.WRITE] == 1
        assert (await store.get("levels/1.sst")).data == data

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
