"""The stores on Google and Azure keep the contract of object stores, on emulators."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.store.api import Created, ObjectStore
from shalekv.store.requests import RequestKind
from tests.contract.opening import create_many, names_in
from tests.contract.store_contract import MIB, HttpStoreContract


class BucketContract(HttpStoreContract):
    async def test_a_large_object_is_one_request(self, store: ObjectStore) -> None:
        """24 MiB are created on a condition, in one piece; the writer's epoch comes back, too."""
        data, metadata = Random(1).randbytes(24 * MIB), {"writer_epoch": "7"}
        assert await store.create("levels/1.sst", data, metadata) == Created()
        assert store.sent.by_kind[RequestKind.WRITE] == 1
        found = await store.get("levels/1.sst")
        assert found.data == data
        assert dict(found.metadata) == metadata

    async def test_requests_are_counted(self, store: ObjectStore, kind: str) -> None:
        """Deletes count by the batch (of 256 on Azure) or the object, lists by the page, the
        clock as a write and a read; a name that is gone makes Azure's batch be sent one by one.
        """
        names = [f"wal/{number:04d}" for number in range(260)]
        await create_many(store, names)
        before = dict(store.sent.by_kind)
        assert len(await names_in(store, "wal/")) == len(names)
        await store.delete(names)
        await store.now_ms()
        spent = {kind: store.sent.by_kind[kind] - before[kind] for kind in RequestKind}
        assert {kind: number for kind, number in spent.items() if number} == {
            RequestKind.LIST: 1,
            RequestKind.DELETE: 2 if kind == "azure" else len(names),
            RequestKind.WRITE: 1,
            RequestKind.READ: 1,
        }
        await create_many(store, names[:5])
        await store.delete(["wal/none", *names[:5], "wal/none"])
        assert await names_in(store, "wal/") == []


class TestAzure(BucketContract):
    many = 60  # its pages are 5,000 names

    @pytest.fixture
    def kind(self) -> str:
        """Azurite."""
        return "azure"


class TestGoogle(BucketContract):
    @pytest.fixture
    def kind(self) -> str:
        """fake-gcs-server."""
        return "google"
