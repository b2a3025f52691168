"""The store on Azure keeps the contract of object stores, on Azurite."""

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
from tests.servers.azurite import AzureServer

numbers = count(1)


@pytest.fixture
def open_store(azure_server: AzureServer, monkeypatch: pytest.MonkeyPatch) -> OpenStore:
    """Instances on one folder of one container that share nothing else."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azure_server.account)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azure_server.key)
    container = f"bucket-{next(numbers)}"
    azure_server.create_container(container)
    place = BucketUrl(Provider.AZURE, container, "a folder/database")
    settings = StoreSettings(endpoint_url=azure_server.endpoint)
    return lambda: open_bucket(place, inline_runtime(), settings)


class TestAzureStore(BucketContract):
    @pytest.fixture
    def open_store(self, open_store: OpenStore) -> OpenStore:
        """That of this module."""
        return open_store

    async def test_requests_are_counted(self, store: ObjectStore) -> None:
        """Deletes count by the batch, lists by the page, the clock as a write and a read."""
        names = [f"wal/{number:04d}" for number in range(300)]
        await create_many(store, names)
        before = dict(store.sent.by_kind)
        assert len(await names_in(store, "wal/")) == len(names)
        await store.delete(names)
        await store.now_ms()
        spent = {kind: store.sent.by_kind[kind] - before[kind] for kind in RequestKind}
        assert {kind: number for kind, number in spent.items() if number} == {
            RequestKind.LIST: 1,
            RequestKind.DELETE: 2,
            RequestKind.WRITE: 1,
            RequestKind.READ: 1,
        }

    async def test_a_batch_with_a_missing_name_deletes_the_others(self, store: ObjectStore) -> None:
        """One name that is gone does not keep the others of its batch."""
        names = [f"wal/{number}" for number in range(5)]
        await create_many(store, names)
        await store.delete(["wal/none", *names, "wal/none"])
        assert await names_in(store, "wal/") == []
